"""What the reports of ranks cost (common/checkpoint/signals.py): a round a second on each rank, by the number of ranks.

    python -m tests.bench.reports

One process has the store and plays one rank; the reports of the others lie there already. No network, no contention.
"""

import time

import torch.distributed as dist
import tyro

REPORT = "[rank 1000] in phase 'rollout, for the trainers' at Wed Nov 25 17:44:40 2026"


def main(rounds: int = 200) -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    store = dist.PrefixStore("attempt_0", server).clone()
    print("| ranks | rank 0: ms a round | CPU ms of its thread | another rank: ms a round | CPU ms of its thread |\n"
          "| --- | --- | --- | --- | --- |")
    for num_ranks in (8, 64, 1024):
        everyone = [str(rank) for rank in range(num_ranks)]
        store.multi_set(everyone, [REPORT] * num_ranks)
        found = [str(num_ranks)]
        for watched in (everyone, ["0"]):
            start, start_cpu = time.perf_counter(), time.thread_time()
            for _ in range(rounds):
                store.set("0", REPORT)
                if store.check(watched):
                    dict.fromkeys(map(bytes.decode, store.multi_get(watched)))
            found += [f"{1e3 * (time.perf_counter() - start) / rounds:.2f}",
                      f"{1e3 * (time.thread_time() - start_cpu) / rounds:.2f}"]
        print(f"| {' | '.join(found)} |")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
