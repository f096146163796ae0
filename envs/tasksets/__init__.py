"""What envs/verifiers_env.py needs: checks of an environment of `verifiers`, and a root folder for an episode."""
