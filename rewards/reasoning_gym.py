"""Score by the reasoning-gym library's own scorer of each task (https://github.com/open-thought/reasoning-gym).

ground_truth: the library's entry (question, answer, metadata) as JSON or dict, metadata with "source_dataset"; or the
answer alone, with the entry's metadata in extra_info["metadata"]. The response's last <answer>...</answer> counts, or
all of it without one.
"""

import contextlib
import functools
import json

from rewards.format import last_between


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    entry = entry_of(ground_truth, extra_info or {})
    answer = last_between(solution_str, "<answer>", "</answer>")  # as the library's extract_answer, in linear time
    answer = (solution_str if answer is None else answer).strip()
    score = float(task(entry["metadata"]["source_dataset"]).score_answer(answer, entry))
    return {"score": score, "acc": score >= 1.0, "pred": answer[:200]}


def entry_of(ground_truth: str | dict, extra_info: dict) -> dict:
    entry = ground_truth
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):  # an answer may begin like this too
            entry = json.loads(ground_truth)
    if not isinstance(entry, dict) or "metadata" not in entry:
        metadata = extra_info.get("metadata") or {}
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        entry = {"question": extra_info.get("question", ""), "answer": ground_truth, "metadata": metadata}
    if "source_dataset" not in entry["metadata"]:
        raise ValueError("neither ground_truth nor extra_info has the metadata of a reasoning-gym entry, with its "
                         "source_dataset; data/reasoning_gym_task.py writes them")
    return entry


@functools.cache
def task(name: str):
    """The library's data set of this name, for its scorer only: one entry, which is not generated."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0)


def check(**_) -> None:
    """Before training: the library must be there."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise ValueError(f"reasoning_gym rewards need the library: pip install reasoning-gym ({error})") from error
