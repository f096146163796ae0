"""The parts that the scripts share. Nothing here imports a script or sees a script's `Args`.

Letters in shape comments:

    P  prompts in a step          T  packed tokens (prompts and responses, one sequence after the other)
    G  samples per prompt         H  hidden size
    S  responses (P * G)          V  vocabulary

Index convention: `x[t]` describes token t. `logp[t]` is log p(token t | tokens before t), `mask[t]` says that the
policy sampled token t (its stop token included). The shift from the model's "next token" output happens in one
place, `policy.Policy.forward`.

A module that has flags owns a dataclass beside the code it configures (`RolloutConfig`, `OptimConfig`, ...) and the
scripts nest it. vLLM is imported inside functions only, so every module can be imported on any machine.
"""
