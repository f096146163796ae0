"""The parts that the scripts share. Nothing here imports a script or sees a script's own flags.

Letters in shape comments:

    P  prompts in a step          T  packed tokens (prompts and responses, one sequence after the other)
    G  samples per prompt         H  hidden size
    S  responses (P * G)          V  vocabulary

Index convention: `x[t]` describes token t. `logp[t]` is log p(token t | tokens before t), `mask[t]` says that the
policy sampled token t (its stop token included). The shift from the model's "next token" output happens in one
place, `make_row` in common/model/sequence_parallel.py.

What a step means is in the files of this folder. Read them in this order: rollout, batch, packing, losses, segments,
correction, kernels, metrics, optim, prompts, training, run. What makes it run is in the packages below (engine, model,
parallel, dataset, checkpoint, tracking); a file here names what it needs of them, and you need not open them.

A module that has flags owns a dataclass beside the code it configures (`RolloutConfig`, `OptimConfig`, ...), and
`TrainArgs` and `RunArgs` nest them. vLLM is imported inside functions only: any machine can import every module.
"""
