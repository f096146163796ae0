"""Vision-language models: a tower turns images into embeddings that replace tokens in a packed row.

Pixels never travel between ranks. A micro-batch holds the numbers of its prompts' rows in the data, and the rank that
runs it makes their pixels again from the data. The files of an episode's further images travel to that rank.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from common.model.sequence_parallel import Row

QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES = {"qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "qwen3_vl_moe": QWEN, "internvl": "<IMG_CONTEXT>\n"}
"""The text that represents an image in a prompt, for the families whose language model is causal over images too. In
Gemma 3, for example, the tokens of an image see each other."""
WORKERS = ThreadPoolExecutor(4)  # make pixels


def auto_class(config: PretrainedConfig) -> type:
    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def hidden_with_images(backbone: PreTrainedModel, row: Row, prompts: Any) -> Tensor:
    """The hidden states [t, H] of a packed row. `prompts`: the prompts of the data (PromptSet).

    The tower runs once for each different image. A row without images runs the tower too, on a small picture and
    without an effect, because FSDP's collectives must match on all ranks."""
    batch, config, device = row.batch, backbone.config, row.run.device
    rows = torch.where(batch.index < 0, -1, batch.row).tolist()                                 # a dummy has no images
    files = [prompts.images_of(number, of_prompt) for number, of_prompt in zip(batch.number.tolist(), rows)]
    different = [*dict.fromkeys(chain(*files))]
    made = list(WORKERS.map(prompts.inputs_of, different or [None]))
    pixels = {name: torch.cat([inputs[name] for _, inputs in made]).to(device) for name in made[0][1]}
    features = backbone.get_image_features(**pixels)
    layers = [torch.cat(tuple(x)) for x in (features.pooler_output, *features.get("deepstack_features", ()))]

    counts = [tokens.count(config.image_token_id) for tokens, _ in made]
    # an image's features, and its pixels
    known = {file: (torch.arange(last - count, last), inputs)
             for file, count, last, (_, inputs) in zip(different, counts, accumulate(counts), made)}
    positions, sources = [], []
    for of_sequence, tokens in zip(files, batch.tokens.cpu().split(batch.host_lengths)):
        shown = torch.cat([tokens[:0], *(known[file][0] for file in of_sequence)])
        is_image = tokens == config.image_token_id
        is_image &= is_image.cumsum(0) <= len(shown)                                            # a policy may sample it
        axes = torch.arange(len(tokens))[None]
        if "mrope_section" in (config.get_text_config().rope_parameters or {}):                 # time, height, width
            grids = {name: torch.cat([known[file][1][name] for file in of_sequence]) for name in pixels if of_sequence}
            axes = backbone.get_rope_index(tokens[None], is_image[None].long(), **grids)[0][:, 0]
        positions.append(axes)
        source = torch.full_like(tokens, -1)
        source[is_image] = shown
        sources.append(source)
    positions, source = (torch.cat(x, dim=-1).to(device) for x in (positions, sources))         # [axes, T], [T]
    positions, source = positions[..., row.run], source[row.run]                                # [axes, t], [t]
    replaced = source >= 0

    embeddings = backbone.get_input_embeddings()(batch.tokens[row.run])                                 # [t, H]
    embeddings = torch.where(replaced[:, None], layers[0][source].to(embeddings.dtype), embeddings)
    more = [layer[source[replaced]] for layer in layers[1:]]        # Qwen3-VL adds them to its first layers' outputs
    deep = {"visual_pos_masks": replaced[None], "deepstack_visual_embeds": more} if more else {}
    positions = positions[:, None] if len(positions) == 3 else positions                        # [3, 1, t] or [1, t]
    out = backbone.language_model(inputs_embeds=embeddings[None], position_ids=positions, use_cache=False,
                                  **row.layout, **deep)
    return out.last_hidden_state[0]
