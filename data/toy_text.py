"""Gymnasium's toy texts for envs/gymnasium_env.py: python data/toy_text.py --game FrozenLake-v1 --out data/toy_text

A row is a seed; of FrozenLake each row has a map of its own as well. Needs `pip install gymnasium==1.4.0`. The same
seed gives the same bytes.
"""

import json

from verl_rows import add_sizes, make_row, parser, run, write

RULES = {
    "FrozenLake-v1": "You walk on a frozen lake from S to the goal G. F is ice, H a hole in which the game is lost. "
                     "The place where you are is in brackets. Write one of left, down, right, up each turn.",
    "Taxi-v4": "You drive a taxi. Pick up the passenger and drop them off at their destination; R, G, Y and B are "
               "stops, | and - walls, and brackets mark the taxi, the passenger and the destination. Write one of "
               "south, north, east, west, pickup, dropoff each turn.",
}


def rows(game: str, split: str, seeds: range) -> list[dict]:
    try:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map
    except ModuleNotFoundError:
        raise ValueError("gymnasium is not installed; run `pip install gymnasium==1.4.0`") from None
    made = []
    for index, seed in enumerate(seeds):
        options = {}
        if game == "FrozenLake-v1":
            options = {"desc": generate_random_map(size=4, seed=seed), "is_slippery": False}
        row = make_row(game, RULES[game], "", "game", split, index, game=game, seed=seed, options=json.dumps(options))
        row["prompt"] = [{"role": "system", "content": RULES[game]}]  # the first picture is the first user message
        made.append(row)
    return made


def main() -> None:
    args = parser(__doc__, "toy_text")
    args.add_argument("--game", choices=list(RULES), default="FrozenLake-v1", help="the game (FrozenLake-v1)")
    add_sizes(args, 512, 64)
    args = args.parse_args()
    if min(args.num_train, args.num_test) < 1 or args.seed < 0:
        raise ValueError(f"--num-train {args.num_train} and --num-test {args.num_test} must be at least 1, --seed "
                         f"{args.seed} at least 0")
    start = args.seed * 1_000_000
    write(rows(args.game, "test", range(start, start + args.num_test)), args.out / "test.parquet")
    first = start + args.num_test
    write(rows(args.game, "train", range(first, first + args.num_train)), args.out / "train.parquet")


if __name__ == "__main__":
    run(main)
