"""Score of IFEval (Zhou et al. 2023, arXiv 2311.07911): whether a response follows instructions that a program checks.

The checkers are those of EleutherAI's package lm_eval. ground_truth is a JSON text or dict,
{"key", "prompt", "instruction_id_list", "kwargs"}, as data/ifeval.py writes it. The score is strict accuracy by prompt:
1 if all instructions are followed. Beside it are the other three numbers of the paper (section 2.2): `loose`, the same
where the best of eight versions of the response counts (without its first line, its last line, its asterisks), and
`num_strict` and `num_loose`, the instructions of the prompt that are followed, out of `num_instructions`. Accuracy by
instruction is the mean of `num_strict` over the mean of `num_instructions`.
"""

import functools
import importlib
import json
import sys

COMMAND = "pip install lm_eval==0.4.13 langdetect immutabledict nltk && python -m nltk.downloader punkt_tab"


@functools.cache
def checkers():
    """The module of lm_eval with its checkers. Its language detector draws random numbers: they get a fixed seed."""
    module = importlib.import_module("lm_eval.tasks.ifeval.utils")
    importlib.import_module("langdetect").DetectorFactory.seed = 0
    return module


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    """Of a response with a thinking part, what follows </think> is judged."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    found = checkers().process_results(truth, [solution_str.rpartition("</think>")[2].strip()])
    strict, loose = found["inst_level_strict_acc"], found["inst_level_loose_acc"]
    return {"score": float(all(strict)), "acc": all(strict), "loose": float(all(loose)),
            "num_strict": float(sum(strict)), "num_loose": float(sum(loose)), "num_instructions": float(len(strict))}


def check(**_) -> None:
    """Before training: ValueError if the package, or the data with which it finds sentences, is missing."""
    try:
        for name in ("lm_eval", "langdetect", "immutabledict", "nltk"):
            importlib.import_module(name)
        sys.modules["nltk"].data.find("tokenizers/punkt_tab")
        checkers()                      # without punkt_tab, its import would download
    except ModuleNotFoundError as error:
        raise ValueError(f"package {error.name} is not installed; run `{COMMAND}`") from None
    except LookupError:
        raise ValueError("nltk's punkt_tab, which finds sentences, is not on this machine; run `python -m "
                         "nltk.downloader punkt_tab`, or copy its folder nltk_data/tokenizers/punkt_tab") from None
