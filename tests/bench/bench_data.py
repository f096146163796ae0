"""Memory and seconds of loading a large parquet file: python -m tests.bench.bench_data --rows 1000000

Rows look like GSM8K's in verl's columns (about 250 characters of prompt, 300 of extra_info), in one row group, which is
the worst case for streaming. Prints seconds, rows per second, the process's memory before and at its peak during
loading (anonymous memory: mapped files are not counted, they can be dropped), the size of the Arrow file, and the
seconds of reading a batch of 128 random prompts and of shuffling an epoch.
"""

import argparse
import random
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from common.curriculum.sampler import PromptSampler
from common.dataset.store import load_prompts
from common.prompts import DataConfig
from tests.bench.record import report

WORDS = ["a", "the", "of", "Anna", "Ben", "has", "gives", "apples", "boxes", "more", "how", "many", "does", "left", "3",
         "17", "250", "each", "buys", "sells", "week", "then"]


def make_file(path: Path, num_rows: int, row_group_rows: int) -> None:
    rng = random.Random(0)
    writer = None
    for start in range(0, num_rows, row_group_rows):
        rows = []
        for index in range(start, min(start + row_group_rows, num_rows)):
            question, answer = (" ".join(rng.choices(WORDS, k=k)) for k in (55, 65))
            rows.append({"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": question}],
                         "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(index)},
                         "extra_info": {"split": "train", "index": index, "answer": answer, "question": question}})
        table = pa.Table.from_pylist(rows)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=row_group_rows)
    writer.close()


def anonymous_mb() -> float:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--row-group-rows", type=int, default=0, help="0: one row group")
    parser.add_argument("--file", type=Path, help="use this parquet file; made there if it does not exist")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "rows.parquet"
        if not path.exists():
            make_file(path, args.rows, args.row_group_rows or args.rows)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        samples, stop = [anonymous_mb()], threading.Event()

        def watch() -> None:
            while not stop.wait(0.1):
                samples.append(anonymous_mb())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        prompts = load_prompts([str(path)], tokenizer, DataConfig())
        seconds = time.perf_counter() - start
        stop.set()
        watcher.join()
        arrow_mb = prompts.table.nbytes / 1e6
        print(prompts.loaded.summary())
        print(f"file {path.stat().st_size / 1e6:.0f} MB in {pq.ParquetFile(path).num_row_groups} row group(s); "
              f"Arrow file {arrow_mb:.0f} MB")
        after = anonymous_mb()
        print(f"load {seconds:.1f} s, {prompts.loaded.num_rows / seconds:.0f} rows/s; anonymous memory before "
              f"{samples[0]:.0f} MB, peak {max(samples):.0f} MB, after {after:.0f} MB")
        sampler = PromptSampler(len(prompts), prompts.loaded.data_hash, seed=0)
        start = time.perf_counter()
        sampler.take(1)
        shuffle = time.perf_counter() - start
        times = []
        for _ in range(20):
            start = time.perf_counter()
            batch = [prompts[i] for i in sampler.take(128)]
            times.append(time.perf_counter() - start)
        print(f"shuffle {shuffle * 1e3:.0f} ms an epoch; 128 random prompts {np.median(times) * 1e3:.1f} ms (median); "
              f"{sum(len(prompt.tokens) for prompt in batch)} tokens; memory then {anonymous_mb():.0f} MB")
        rows = prompts.loaded.num_rows
        report("data", rows=rows, file_mb=path.stat().st_size / 1e6, arrow_mb=arrow_mb,
               row_groups=pq.ParquetFile(path).num_row_groups, load_s=seconds, rows_per_s=rows / seconds,
               before_mb=samples[0], peak_mb=max(samples), after_mb=after, shuffle_ms=shuffle * 1e3,
               read_128_ms=float(np.median(times)) * 1e3)


if __name__ == "__main__":
    main()
