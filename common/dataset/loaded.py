"""What was read of data files, and what was left out."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from envs.runtime.template import special_tokens


@dataclass
class Loaded:
    """What was read, and what was left out of it."""
    files: list[str]
    num_rows: int = 0  # read, good or bad
    num_filtered: int = 0  # longer than max_prompt_length and left out
    num_truncated: int = 0  # longer and cut
    bad_rows: list[dict[str, Any]] = field(default_factory=list)  # left out: {file, row, rule}
    columns: set[str] = field(default_factory=set)  # of the rows, under the files' names, if they mean something here
    data_sources: set[str] = field(default_factory=set)  # of the prompts that are left
    num_special: int = 0  # with a text that spells special tokens
    special: set[str] = field(default_factory=set)  # these tokens
    about_special: str = ""  # what the summary says of them
    num_videos: int = 0  # of these prompts
    num_without_truth: int = 0  # of these prompts; their ground truth is an empty text
    lengths: str = ""  # of these prompts, in tokens
    data_hash: str = ""  # of all that is in these prompts, in their order

    def summary(self) -> str:
        num_left = self.num_rows - self.num_filtered - len(self.bad_rows)
        return (f"{num_left} prompts from {len(self.files)} file(s), {self.lengths} tokens; of {self.num_rows} rows "
                f"{self.num_filtered} filtered (too long), {self.num_truncated} truncated, {len(self.bad_rows)} bad"
                f"{self.about_special}")

    def note_special(self, text: str, tokenizer: Any, is_plain: bool) -> None:
        """Count a row whose text spells special tokens. In the text of a chat template they are guarded."""
        special = special_tokens(tokenizer)
        if is_plain:
            found = set(special.pattern.findall(text))
            how = "which are read as such"
        else:
            found = special.spelled(text)
            how = "which are text there"
        if found:
            self.num_special += 1
            self.special |= found
            self.about_special = f"; {self.num_special} spell special tokens ({' '.join(sorted(self.special))}), {how}"

    def write_skipped(self, path: str | Path) -> None:
        """Rank 0 writes one JSON line {file, row, rule} for every bad row left out; no file if there is none."""
        if not self.bad_rows or (dist.is_initialized() and dist.get_rank()):
            return
        with Path(path).open("w") as file:
            for bad in self.bad_rows:
                file.write(json.dumps(bad) + "\n")
