"""The parts that the scripts share. Nothing here imports a script or sees a script's own flags.

Letters in shape comments:

    P  prompts in a step          T  packed tokens (prompts and responses, one sequence after the other)
    G  samples per prompt         H  hidden size
    S  responses (P * G)          V  vocabulary

Index convention: `x[t]` describes token t. `logp[t]` is log p(token t | tokens before t), `mask[t]` says that the
policy sampled token t (its stop token included). The shift from the model's "next token" output happens in one
place, `make_row` in common/forward/sequence_parallel.py.

What a step means is in the files of this folder. Read them in this order: rollout, batch, packing, losses, segments,
correction, metrics, optim, prompts, training, run. What makes it run is in the packages below; a file here names what
it needs of them, and you need not open them. What a single script chooses from, such as the published losses, is in
variants/, beside the scripts.

Files and packages are layers, and imports point downward only, those inside functions too; tests/scripts/test_style.py
holds it. From the top: the scripts stand on run, and run on training; evaluation is for scripts that stand on training
alone, and distillation for distill.py. Below are rollouts, curriculum, episodes, tracking and checkpoint, which follow
a step from sampling to disk; then the engine, its speculation, and the dataset. Next comes what a step is made of:
losses, correction, rollout, and optim. Then memory, the model, its forward pass and the kernels that it calls. At the
bottom is what knows no model: packing, prompts, metrics, segments, parallel, batch, layout, source, flags, each above
the next.

Words, each with one meaning:

    response, sequence   what the policy sampled for a prompt; an episode may be several sequences, one response
    row, index, number   of the data set; of a response in the step; of a sequence in the step
    group                the responses to one prompt
    mask [T]             True on tokens that the policy sampled and that count in the loss
    in_loss [S]          the response's tokens are in the loss and in its denominators
    left out             in the loss with advantage 0: it does not run, and only counts in the denominators
    canary [S]           it could be left out and runs: a gradient on it ends the step
    NaN                  a reward or a score that does not exist; it is in no group's statistics
    fresh [S]            sampled in this step, by the current weights
    dropped              taken out before the loss, and counted by a metric
    step > epoch > mini-batch (one optimizer step) > micro-batch (one forward and backward pass)
    rollout              phase 1 of a step; `Rollout` holds its responses; --rollout.* are the flags of the phase

The dataclasses of flags (`RolloutConfig`, `OptimConfig`, ..., and `TrainArgs` and `RunArgs`, which nest them) and what
is refused of them without a model are in flags/, which imports neither torch nor transformers: a mistyped command ends
before those are imported. vLLM is imported inside functions only: any machine can import every module.
"""
