"""The score of a task as a measurement alone: --reward.function rewards/measured.py --reward-model.path RUN_DIR/model

The score is 0, so the reward model's score is the only reward (as with --reward-model.alone). The task's own score,
that of the table in rewards/__init__.py, is `acc`: validation counts it, and steps have its mean as `reward/acc`.
Whether a policy gets better, and not only better liked by its reward model, is seen there.
"""

from rewards import find, takes


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """ValueError for a data source that the table does not know."""
    function = find(data_source)
    if function is None:
        raise ValueError(f"no reward for data_source {data_source!r} in the table of rewards/__init__.py")
    given = {name: value for name, value in kwargs.items() if takes(function, name)}
    result = function(data_source, solution_str, ground_truth, extra_info, **given)
    found = dict(result) if isinstance(result, dict) else {"score": result}
    score = found.pop("score")
    return {"acc": score} | found | {"score": 0.0}
