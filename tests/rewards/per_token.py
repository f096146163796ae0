"""A user's reward file that gives each character of a response a number, for test_lists.py."""

import math


def numbers(text):
    return [math.sin(ord(character) * (i + 1)) * 10.0 ** (ord(character) % 40 - 20) for i, character in enumerate(text)]


def as_list(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "per_token": numbers(solution_str), "acc": True}


def as_tuple(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "per_token": tuple(numbers(solution_str))}


def as_array(data_source, solution_str, ground_truth, extra_info=None):
    import numpy as np

    return {"score": 1.0, "per_token": np.array(numbers(solution_str))}


def as_scalars(data_source, solution_str, ground_truth, extra_info=None):
    import numpy as np

    return {"score": 1.0, "per_token": list(np.array(numbers(solution_str)))}


def as_tensor(data_source, solution_str, ground_truth, extra_info=None):
    import torch

    return {"score": 1.0, "per_token": torch.tensor(numbers(solution_str), dtype=torch.float64)}


async def as_coroutine(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "per_token": numbers(solution_str)}


def as_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": 1.0, "per_token": numbers(text)} for text in solution_strs]
