"""Whether --model can be read without a network: python tools/check_model.py --model NAME [FLAGS OF A SCRIPT]

slurm/job.sh calls it before anything heavy, because compute nodes often reach no network. The last --model counts, as
it does for the scripts. With HF_HUB_OFFLINE=0 there is nothing to check.
"""

import argparse
import os
import sys
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError


def has_weights(folder: Path) -> bool:
    return any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    model = parser.parse_known_args()[0].model
    if os.path.isdir(model) or not constants.is_offline_mode():
        return
    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # the form of a path
        sys.exit(f"error: --model {model} is neither a folder here nor the name of a hub model")
    if not isinstance(config, str) or not has_weights(Path(config).parent):
        sys.exit(f"error: --model {model} is no folder here, and the hub cache {constants.HF_HUB_CACHE} does not have "
                 f"it. Where there is a network, run `hf download {model}` with the same HF_HOME; if this node reaches "
                 f"the hub, set HF_HUB_OFFLINE=0")


if __name__ == "__main__":
    main()
