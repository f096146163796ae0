"""Episodes for the forks of test_forks.py."""


async def until_even(chat, row):
    """Replies until the characters of one have an even sum, at most four; the score says whether one had."""
    text = await chat.reply(max_tokens=4)
    for _ in range(3):
        if sum(map(ord, text or "")) % 2 == 0:
            return 1.0
        text = await chat.reply({"role": "user", "content": "Again."}, max_tokens=4)
    return float(sum(map(ord, text or "")) % 2 == 0)
