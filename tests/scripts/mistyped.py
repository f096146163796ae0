"""Commands as people mistype them: what each says, and how long that takes. `python -m tests.scripts.mistyped` prints
the table (tests/evidence/users.md has its summary); test_mistyped.py runs those that need no model's code.

MODEL, DATA and DIR stand for a model folder, a data file and a folder with the files that `prepare` writes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.checkpoint.faulty import python_path
from tests.conftest import MODEL, ROOT

GOOD = "--model MODEL --train-data DATA"
EARLY = {
    # flags
    "a letter swapped in a flag": (f"grpo.py {GOOD} --modle x", "--modle", "--model"),
    "a nested flag mistyped": (f"grpo.py {GOOD} --rollout.engin hf", "--rollout.engin", "--rollout.engine"),
    "a nested flag without its group": (f"grpo.py {GOOD} --max-response-length 64", "--max-response-length",
                                        "--rollout.max-response-length"),
    "another script's flag": (f"grpo.py {GOOD} --gamma 0.9", "--gamma", "ppo.py"),
    "TRL's name of a flag": (f"grpo.py {GOOD} --num-generations 8", "--num-generations"),
    "verl's form of a flag": (f"grpo.py {GOOD} trainer.total_epochs=3", "trainer.total_epochs=3"),
    "a word for a number": (f"grpo.py {GOOD} --total-steps ten", "--total-steps", "ten"),
    "a unit in a number": (f"grpo.py {GOOD} --max-tokens-per-gpu 16k", "--max-tokens-per-gpu", "16k"),
    "a decimal comma": (f"grpo.py {GOOD} --optim.lr 1,5e-6", "--optim.lr", "1,5e-6"),
    "a float for a whole number": (f"grpo.py {GOOD} --prompts-per-step 1e2", "--prompts-per-step", "1e2"),
    "a choice that does not exist": (f"grpo.py {GOOD} --rollout.engine sglang", "--rollout.engine", "sglang", "vllm"),
    "a choice in capitals": (f"grpo.py {GOOD} --kl-estimator K3", "--kl-estimator", "K3", "k3"),
    "TRL's form of a flag": (f"grpo.py {GOOD} --num_generations 4", "--num_generations", "tools.from_trl"),
    "verl's key": (f"grpo.py {GOOD} +data.train_batch_size=8", "data.train_batch_size=8", "tools.from_verl"),
    "a short name of a nested flag": (f"grpo.py {GOOD} --temperature 0.7", "--temperature",
                                      "did you mean --rollout.temperature?"),
    "one that two groups have": (f"grpo.py {GOOD} --weights token", "--correction.weights", "--reward.weights"),
    "True after a switch": (f"grpo.py {GOOD} --norm-by-std True", "True"),
    "one of two numbers": (f"grpo.py {GOOD} --optim.betas 0.9", "--optim.betas", "2"),
    "a flag without its value": ("grpo.py --train-data DATA --model", "--model"),
    "no data": ("grpo.py --model MODEL", "--train-data"),
    "a negative learning rate": (f"grpo.py {GOOD} --optim.lr=-1e-6", "--optim.lr", "positive"),
    "NaN": (f"grpo.py {GOOD} --clip-high nan", "--clip-high", "nan"),
    "verl's number for all prompts": (f"grpo.py {GOOD} --eval-prompts -1", "--eval-prompts -1", "0: all"),
    "fewer responses than none": (f"grpo.py {GOOD} --eval-n -1", "--eval-n -1", "at least 0"),
    "vLLM's number for all tokens": ("evaluate.py --model MODEL --val-data DATA --rollout.val-top-k -1",
                                     "--rollout.val-top-k -1", "0: all tokens"),
    "the same in training": (f"grpo.py {GOOD} --rollout.top-k -1", "--rollout.top-k -1", "0: all tokens"),
    "a random seed below zero": (f"sft.py {GOOD} --seed -1", "--seed -1", "at least 0"),
    "a temperature below zero": (f"rloo.py {GOOD} --eval-temperature -0.5", "--eval-temperature -0.5", "at least 0"),
    "an engine on no rank": (f"grpo.py {GOOD} --rollout.tp 0", "--rollout.tp 0", "at least 1"),
    "a KL that is rewarded": (f"rloo.py {GOOD} --kl-reward-coef -0.1", "--kl-reward-coef -0.1", "at least 0"),
    "the same in the loss": (f"grpo.py {GOOD} --kl-loss-coef -0.1", "--kl-loss-coef -0.1", "at least 0"),
    "a penalty that rewards length": (f"dapo.py {GOOD} --overlong-buffer 8 --overlong-factor -1",
                                      "--overlong-factor -1", "at least 0"),
    "fewer failures than none": (f"grpo.py {GOOD} --reward.max-error-frac -1", "--reward.max-error-frac -1"),
    "a temperature that vLLM raises": (f"grpo.py {GOOD} --rollout.temperature 0.001", "--rollout.temperature 0.001",
                                       "0.01 to 2"),
    "one of validation that vLLM refuses": (f"grpo.py {GOOD} --eval-temperature 3", "--eval-temperature 3", "vLLM"),
    "a share of a prompt in flight": (f"grpo.py {GOOD} --prompts-per-step 4 --rollout.in-flight 1.1",
                                      "--rollout.in-flight 1.1", "--prompts-per-step 4", "1.25"),
    "episodes that an evaluation drops": ("evaluate.py --model MODEL --val-data DATA --rollout.episode "
                                          "envs/calculator.py --rollout.drop timeout", "--rollout.drop", "training"),
    "an empty text that ends responses": (f"grpo.py {GOOD} --rollout.stop=", "--rollout.stop ''", "empty"),
    "sampling without a temperature": (f"grpo.py {GOOD} --rollout.temperature -1", "--rollout.temperature -1",
                                       "above 0"),
    "greedy training": (f"distill.py {GOOD} --teacher MODEL --rollout.temperature 0", "--rollout.temperature 0"),
    "no response": (f"ppo.py {GOOD} --rollout.max-response-length 0", "--rollout.max-response-length 0", "at least 1"),
    "more than all": ("evaluate.py --model MODEL --val-data DATA --rollout.val-top-p 1.5", "--rollout.val-top-p 1.5"),
    "weights of other rewards": (f"grpo.py {GOOD} --reward.function DIR/reward.py:score --reward.weights 1 2",
                                 "--reward.weights has 2", "give one weight per function"),
    "arguments of a reward that are no JSON": (f"grpo.py {GOOD} --reward.kwargs method=flexible",
                                               "--reward.kwargs method=flexible", "JSON object"),
    "a reward of other arguments": (f"grpo.py {GOOD} --reward.function DIR/short.py:score", "short.py:score",
                                    "ground_truth=...", "**kwargs"),
    # flags that do nothing without another one
    "validation without rows": (f"grpo.py {GOOD} --eval-every 5", "--eval-every 5", "--val-data"),
    "its number of responses": (f"dapo.py {GOOD} --eval-n 8", "--eval-n 8", "--val-data"),
    "its share": (f"rloo.py {GOOD} --rollout.val-top-p 0.5", "--rollout.val-top-p 0.5", "--val-data"),
    "a temperature of greedy responses": ("evaluate.py --model MODEL --val-data DATA --eval-n 0 --eval-temperature 0.7",
                                          "--eval-temperature 0.7", "--eval-n 0"),
    "a best step without validation": (f"sft.py {GOOD} --save.keep-best", "--save.keep-best", "--val-data"),
    "an estimate of no KL": (f"grpo.py {GOOD} --kl-estimator k1", "--kl-estimator k1", "--kl-loss-coef"),
    "the same in the reward": (f"ppo.py {GOOD} --kl-reward-estimator k3", "--kl-reward-estimator k3",
                               "--kl-reward-coef"),
    "vLLM's ranks without it": (f"grpo.py {GOOD} --rollout.engine hf --rollout.tp 2", "--rollout.tp 2",
                                "--rollout.engine hf"),
    "what vLLM takes, without it": (f"grpo.py {GOOD} --rollout.engine hf --rollout.stop x", "--rollout.stop",
                                    "--rollout.engine hf"),
    "a chat template of plain texts": (f"grpo.py {GOOD} --data.template plain --data.chat-template-kwargs {{}}x",
                                       "--data.template plain"),
    "a column of a name that is given": (
        f"grpo.py {GOOD} --data.data-source gsm8k --data.data-source-column source",
        "--data.data-source-column source"),
    "training's flags in an evaluation": ("evaluate.py --model MODEL --val-data DATA --policy.share-prompt",
                                          "--policy.share-prompt", "training"),
    "a function beside a model that is alone": (
        f"grpo.py {GOOD} --reward-model.path MODEL --reward-model.alone --reward.function DIR/reward.py:score",
        "--reward.function", "--reward-model.alone"),
    "episodes that are dropped, without episodes": (f"grpo.py {GOOD} --rollout.drop length", "--rollout.drop",
                                                    "--rollout.episode"),
    "turns without episodes": ("evaluate.py --model MODEL --val-data DATA --rollout.max-turns 3",
                               "--rollout.max-turns 3", "--rollout.episode"),
    "staleness of what is in flight, in async_grpo.py": (
        f"WORLD_SIZE=2 RANK=0 async_grpo.py {GOOD} --rollout.max-staleness 0", "--rollout.max-staleness 0",
        "--rollout.in-flight"),
    "a controller without a KL": (f"ppo.py {GOOD} --kl-controller adaptive", "--kl-controller adaptive",
                                  "--kl-reward-coef"),
    "a target without its controller": (f"ppo.py {GOOD} --kl-reward-coef 0.1 --kl-target 0.2", "--kl-target 0.2",
                                        "--kl-controller fixed"),
    "a clip of a loss without one": (f"rloo.py {GOOD} --clip-high 0.28", "--clip-high 0.28", "--loss reinforce"),
    "a penalty over no tokens": (f"dapo.py {GOOD} --overlong-factor 0.5", "--overlong-factor 0.5",
                                 "--overlong-buffer"),
    "alpha of no adapters": (f"sft.py {GOOD} --lora.alpha 64", "--lora.alpha 64", "--lora.rank"),
    "weight of no reward model": (f"grpo.py {GOOD} --reward-model.weight 0.5", "--reward-model.weight 0.5",
                                  "--reward-model.path"),
    "a mixture's share of another divergence": (f"distill.py {GOOD} --teacher MODEL --beta 0.9", "--beta 0.9",
                                                "--divergence reverse-kl"),
    "answers that no step has": (f"distill.py {GOOD} --teacher MODEL --answer-key solution", "--answer-key solution",
                                 "--answers-per-step"),
    "the end of a schedule that is constant": (f"sft.py {GOOD} --optim.min-lr-frac 0.1", "--optim.min-lr-frac 0.1",
                                               "--optim.schedule constant"),
    "the critic's": (f"ppo.py {GOOD} --optim.schedule cosine --critic-optim.min-lr-frac 0.1",
                     "--critic-optim.min-lr-frac 0.1", "--critic-optim.schedule constant"),
    "IcePop without weights": (f"grpo.py {GOOD} --correction.outside zero", "--correction.outside zero",
                               "--correction.weights"),
    "a project of wandb, to which nothing goes": (f"dpo.py {GOOD} --log.wandb-project mine", "--log.wandb-project mine",
                                                  "--log.to"),
    "a surplus of one rollout": (f"dapo.py {GOOD} --keep-surplus --max-gen-batches 1", "--keep-surplus",
                                 "--max-gen-batches 1"),
    "whose words, of all": (f"distill.py {GOOD} --teacher MODEL --top-k-of student", "--top-k-of student", "--top-k"),
    "zero prompts": (f"grpo.py {GOOD} --prompts-per-step 0", "--prompts-per-step 0", "at least 1"),
    "sizes that do not divide": (f"grpo.py {GOOD} --prompts-per-step 5 --samples-per-prompt 3 --minibatches-per-step 4",
                                 "--minibatches-per-step 4", "15"),
    "a group of one": (f"grpo.py {GOOD} --samples-per-prompt 1", "--samples-per-prompt 1"),
    "more than all layers": (f"sft.py {GOOD} --policy.gradient-checkpointing 28", "--policy.gradient-checkpointing 28",
                             "[0, 1]"),
    "a clip above 1": (f"grpo.py {GOOD} --clip-low 2", "--clip-low 2"),
    "lambda above 1": (f"ppo.py {GOOD} --lam 1.5", "--lam 1.5"),
    "a buffer longer than the response": (f"dapo.py {GOOD} --overlong-buffer 4096", "--overlong-buffer 4096",
                                          "--rollout.max-response-length"),
    "a baseline of another name": (f"rloo.py {GOOD} --baseline reinforce_plus_plus", "--baseline", "reinforce++"),
    "components without their advantage": (f"grpo_variants.py {GOOD} --reward-components a 1", "--advantage gdpo"),
    "a keep-best without validation": (f"grpo.py {GOOD} --save.best-metric acc", "--save.keep-best"),
    "a teacher without its source": (f"distill.py {GOOD} --teacher MODEL MODEL", "--teacher", "DATA_SOURCE=PATH"),
    "smoothing of one half": (f"dpo.py {GOOD} --label-smoothing 0.5", "--label-smoothing 0.5"),
    "rows below one": (f"sft.py {GOOD} --rows-per-step 0", "--rows-per-step 0"),
    "more samplers than ranks": (f"async_grpo.py {GOOD} --samplers 1", "--samplers 1", "world size 1"),
    # ranks: WORLD_SIZE=3 stands for torchrun --nproc-per-node 3
    "replicas that do not divide the ranks": (f"WORLD_SIZE=3 RANK=0 grpo.py {GOOD} --policy.replicas 2",
                                              "--policy.replicas 2", "3 ranks"),
    "sequence ranks that do not": (f"WORLD_SIZE=3 RANK=0 sft.py {GOOD} --policy.sequence-parallel 2",
                                   "--policy.sequence-parallel 2", "3 ranks"),
    "prompts that do not divide over engines": (f"WORLD_SIZE=3 RANK=0 grpo.py {GOOD} --prompts-per-step 8",
                                                "--prompts-per-step 8", "3 engines"),
    # models
    "a hub model, no network": ("grpo.py --model Qwen/Qwen2.5-0.5B --train-data DATA", "--model", "hub", "hf download"),
    "the same, offline": ("HF_HUB_OFFLINE=1 ppo.py --model Qwen/Qwen2.5-0.5B --train-data DATA", "--model",
                          "HF_HUB_OFFLINE", "hf download"),
    "a model folder that is not there": ("grpo.py --model ./models/none --train-data DATA", "./models/none",
                                         "--model must be"),
    "a folder that holds no model": ("grpo.py --model DIR --train-data DATA", "--model", "config.json"),
    "a file as model": ("sft.py --model DATA --train-data DATA", "--model", "folder"),
    "a critic that is not there": (f"ppo.py {GOOD} --critic-model ./critic", "./critic", "--critic-model must be"),
    "a run folder without a checkpoint": ("evaluate.py --model DIR --val-data DATA", "--model", "checkpoint"),
    # data
    "a data file that is not there": ("grpo.py --model MODEL --train-data data/gsm.parquet", "--train-data",
                                      "data/gsm.parquet"),
    "a csv file for validation": (f"grpo.py {GOOD} --val-data DIR/rows.csv", "--val-data", "rows.csv", ".parquet"),
    "a glob without files": ("dpo.py --model MODEL --train-data DIR/*.parquet", "--train-data", "*.parquet"),
    "a chat template that is not there": (f"grpo.py {GOOD} --data.chat-template-file chat.jinja",
                                          "--data.chat-template-file chat.jinja"),
    # rewards and episodes
    "a reward file that is not there": (f"grpo.py {GOOD} --reward.function my_rewrad.py:score", "--reward.function",
                                        "my_rewrad.py"),
    "a reward function mistyped": (f"grpo.py {GOOD} --reward.function DIR/reward.py:scores", "--reward.function",
                                   "scores", "it has score"),
    "a dot for the colon": (f"grpo.py {GOOD} --reward.function DIR/reward.score", "--reward.function",
                            "path/to/file.py:name"),
    "a reward file with a syntax error": (f"grpo.py {GOOD} --reward.function DIR/broken.py:score",
                                          "--reward.function", "broken.py, line 2"),
    "an episode mistyped": (f"grpo.py {GOOD} --rollout.episode envs/calculater.py", "--rollout.episode",
                            "calculater.py"),
    # run folders
    "a run folder below a file": (f"grpo.py {GOOD} --run-dir DATA/run", "--run-dir", "folder"),
    "a checkpoint that is not there": (f"grpo.py {GOOD} --save.resume runs/nothing", "--save.resume runs/nothing"),
    "a comparison that is not there": ("evaluate.py --model MODEL --val-data DATA --compare runs/nothing",
                                       "--compare runs/nothing"),
}
"""What is wrong -> the command, and what its message must have: value, rule and flag."""
TOOLS = {
    "report of no run": ("-m tools.report runs/nothing", "runs/nothing", "run"),
    "comparison of no runs": ("-m tools.compare runs/nothing runs/other", "runs/nothing", "run folder"),
    "verl's settings that are not there": ("-m tools.from_verl ppo_trainer.yaml", "ppo_trainer.yaml"),
    "a script that is not there": ("-m tools.try_script grop.py", "grop.py"),
    "a model to play that is not there": ("-m tools.play envs/calculator.py --model ./none --prompt hi", "./none"),
    "checkpoints of no run": ("-m tools.checkpoints list runs/nothing", "runs/nothing", "run"),
    "a plan of no script": ("-m tools.plan grop.py --model MODEL", "grop.py"),
    "an audit of no script": ("-m tools.audit grop.py --model MODEL", "grop.py"),
    "data of no count": ("data/word_problems.py --out DIR --rows many", "--rows"),
}
LATER = {
    "a column that is not there": (f"grpo.py {GOOD} --rollout.engine hf --data.prompt-column question", "question"),
    "validation rows of another format": (f"grpo.py {GOOD} --rollout.engine hf --val-data DIR/pairs.jsonl",
                                            "pairs.jsonl"),
    "a reward file that fails at import": (f"grpo.py {GOOD} --rollout.engine hf --reward.function DIR/fails.py:score",
                                           "fails.py", "no_such_module"),
}
"""What the data or the user's own code decides: after the imports, before a model is loaded."""


def prepare(folder: Path) -> None:
    row = {"prompt": "1 + 1?", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "pairs.jsonl").write_text('{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}\n')
    (folder / "rows.csv").write_text("prompt\n1 + 1?\n")
    signature = "def score(data_source, solution_str, ground_truth, extra_info=None):"
    (folder / "reward.py").write_text(f"{signature}\n    return 1\n")
    (folder / "short.py").write_text("def score(text, truth):\n    return 1\n")
    (folder / "broken.py").write_text("def score(a, b):\n    return (a\n")
    (folder / "fails.py").write_text("import no_such_module\n\n\ndef score(*arguments):\n    return 1\n")


def parts(command: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments of Python, and the environment."""
    words = [word.replace("MODEL", str(MODEL)).replace("DATA", f"{folder}/data.jsonl").replace("DIR", str(folder))
             if "DATA_SOURCE" not in word else word for word in command.split()]
    given = {}
    while words[0].partition("=")[0].isupper():
        name, value = words.pop(0).split("=")
        given[name] = value
    return words, given


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        print("| what is wrong | command | CPU s | lines | message |\n| --- | --- | --- | --- | --- |")
        chosen = {what: row for what, row in (EARLY | TOOLS | LATER).items() if not sys.argv[1:] or what in sys.argv}
        for what, (command, *wanted) in chosen.items():
            arguments, given = parts(command, Path(name))
            environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | given
            before = os.times()
            done = subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, env=environment | {"PYTHONPATH": python_path(ROOT)}, text=True,
                capture_output=True, stdin=subprocess.DEVNULL, check=False,
            )
            after = os.times()
            seconds = sum(after[2:4]) - sum(before[2:4])
            said = done.stderr.strip().replace(name, "DIR").replace(str(MODEL), "MODEL").replace(str(ROOT) + "/", "")
            lines = said.splitlines()
            shown = " ".join(lines) if len(lines) < 3 else f"{lines[0]} ... {lines[-1]}"
            missing = [word for word in wanted if word not in said]
            print(f"| {what} | `{command}` | {seconds:.1f} | {len(lines)} | {shown.replace('|', '/')} |", flush=True)
            if missing or done.returncode == 0:
                print(f"{what}: exit code {done.returncode}, {missing} are not in it:\n{said}", file=sys.stderr)


if __name__ == "__main__":
    main()
