"""Contexts for --context in tests."""


def every_second(row, responses):
    """Says nothing of responses with an odd number; to the others the numbers and lengths of all, and the answer."""
    own, *others = responses
    if own["index"] % 2:
        return None
    told = [(response["index"], response["score"], len(response["text"])) for response in others]
    return [*row["prompt"], {"role": "assistant", "content": "What?"},
            {"role": "user", "content": f"{row['ground_truth']} {told} {row['extra_info']['number']}"}]


def broken(row, responses):
    return [{"role": "user", "content": 3}]
