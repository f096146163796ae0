"""The parts that the scripts share. Nothing here imports a script or sees a script's own flags.

Letters in shape comments:

    P  prompts in a step          T  packed tokens (prompts and responses, one sequence after the other)
    G  samples per prompt         H  hidden size
    S  responses (P * G)          V  vocabulary

Index convention: `x[t]` describes token t. `logp[t]` is log p(token t | tokens before t), `mask[t]` says that the
policy sampled token t (its stop token included). The shift from the model's "next token" output happens in one
place, `make_row` in common/model/sequence_parallel.py.

What a step means is in the files of this folder. Read them in this order: rollout, batch, packing, losses, segments,
correction, kernels, metrics, optim, prompts, training, run. What makes it run is in the packages below (rollouts,
engine, model, parallel, dataset, checkpoint, tracking); a file here names what it needs of them, and you need not open
them.

Files and packages are layers, and imports point downward only, those inside functions too;
tests/scripts/test_style.py holds it. From the top: the scripts stand on run, and run on training. Below are rollouts,
tracking and checkpoint, which follow a step from sampling to disk; then selection, the engine, and the dataset. Next
comes what a step is made of: rollout, correction, losses, and optim. Then the model and the kernels that it calls. At
the bottom is what knows no model: packing, prompts, metrics, segments, parallel, batch, shared_prompts, each above the
next.

A module that has flags owns a dataclass beside the code it configures (`RolloutConfig`, `OptimConfig`, ...), and
`TrainArgs` and `RunArgs` nest them. vLLM is imported inside functions only: any machine can import every module.
"""
