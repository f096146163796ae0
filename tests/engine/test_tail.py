"""The seconds in which an engine has few responses left."""

from common.engine.tail import Tail


def test_the_tail_begins_with_less_than_a_quarter():
    """Eight responses, two passes a response: two of the eight are a quarter, one is less."""
    tail = Tail()
    tail.begin()
    for _ in range(8):
        tail.add()
    seconds = []
    for ended in (0, 6, 0, 1, 0, 1):
        tail.step(1.5, ended)
        seconds.append(tail.seconds)
    assert seconds == [0, 0, 0, 0, 1.5, 3.0] and tail.num_unfinished == 0
    assert tail.metrics() == {"timing_s/gen/tail": 3.0} and tail.metrics() == {"timing_s/gen/tail": 0.0}


def test_each_call_has_a_tail_of_its_own():
    """A probe of one response after a rollout of eight is no tail, and neither is what it begins with."""
    tail = Tail()
    tail.begin()
    for _ in range(8):
        tail.add()
    tail.step(1.0, 8)
    tail.begin()
    tail.add()
    tail.step(1.0, 0)                                                   # it is aborted after this pass
    tail.step(0.0, 1)
    tail.begin()
    for _ in range(3):
        tail.add()
    tail.step(1.0, 3)
    assert tail.seconds == 0
