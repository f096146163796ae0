"""Vision-language models: a tower turns images into embeddings that replace tokens in a packed row.

Pixels never travel between ranks. A micro-batch holds the numbers of its prompts' rows in the data, and the
rank that runs it makes their pixels again from the data. The files of an episode's further images travel to
that rank. """

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from common.batch import Batch
from common.forward.sequence_parallel import Row

QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES = {
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
    "internvl": "<IMG_CONTEXT>\n",
}
"""The text that represents an image in a prompt, for the families whose language model is causal over images
too. In Gemma 3, for example, the tokens of an image see each other."""
VIDEO_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Those that read videos, too, with the same tower, in which the steps of a video's time do not see each other."""
WORKERS = ThreadPoolExecutor(4)  # make pixels


def auto_class(config: PretrainedConfig) -> type[Any]:
    if config.model_type in FAMILIES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def placeholders(config: PretrainedConfig) -> list[int]:
    """The tokens that stand for a part of an image, and of a video where the family reads some."""
    found = [config.image_token_id]
    if config.model_type in VIDEO_FAMILIES:
        found.append(config.video_token_id)
    return found


class Image(NamedTuple):
    """One of the different images or videos of a micro-batch."""

    rows: Tensor                                # [n] of the tower's features, those of this image
    inputs: dict[str, Tensor]                   # what the tower gets of it: its pixels, and perhaps their grid


def hidden_with_images(backbone: PreTrainedModel, row: Row, prompts: Any) -> Tensor:
    """The hidden states [t, H] of a packed row. `prompts`: the prompts of the data (PromptSet).

    The tower runs once for each different image. A row without images runs the tower too, on a small picture
    and without an effect, because FSDP's collectives must match on all ranks."""
    batch = row.batch
    device = row.run.device
    files = files_of_sequences(batch, prompts)
    different = list(dict.fromkeys(chain.from_iterable(files)))
    made = list(WORKERS.map(prompts.inputs_of, different or [None]))            # (tokens, inputs) of each image
    first_layer, *deeper_layers = tower_features(backbone, made, device)

    images = {}
    start = 0
    for file, (tokens, inputs) in zip(different, made):
        stop = start + sum(map(tokens.count, placeholders(backbone.config)))
        images[file] = Image(torch.arange(start, stop), inputs)
        start = stop
    positions = []                                                            # of each sequence, [axes, length]
    sources = []
    for sequence_files, tokens in zip(files, batch.tokens.cpu().split(batch.host_lengths)):
        shown = [images[file] for file in sequence_files]
        source = sources_of(tokens, shown, backbone.config)
        sources.append(source)
        positions.append(positions_of(backbone, tokens, source >= 0, shown))
    source = torch.cat(sources).to(device)[row.run]                                             # [t]
    position_ids = torch.cat(positions, dim=-1).to(device)[..., row.run]                        # [axes, t]
    if len(position_ids) == 3:
        position_ids = position_ids[:, None]                              # transformers: [3, 1, t], else [1, t]

    replaced = source >= 0
    embeddings = backbone.get_input_embeddings()(batch.tokens[row.run])                                 # [t, H]
    embeddings = torch.where(replaced[:, None], first_layer[source].to(embeddings.dtype), embeddings)
    deepstack = {}
    if deeper_layers:                                          # Qwen3-VL adds them to its first layers' outputs
        deepstack["visual_pos_masks"] = replaced[None]
        deepstack["deepstack_visual_embeds"] = [layer[source[replaced]] for layer in deeper_layers]
    out = backbone.language_model(
        inputs_embeds=embeddings[None],
        position_ids=position_ids,
        use_cache=False,
        **row.layout,
        **deepstack,
    )
    return out.last_hidden_state[0]


def files_of_sequences(batch: Batch, prompts: Any) -> list[list[Any]]:
    """The files of the images in each sequence, in their order."""
    rows = torch.where(batch.index < 0, -1, batch.image_row).tolist()           # a dummy has no images
    files = []
    for number, of_prompt in zip(batch.number.tolist(), rows):
        files.append(prompts.images_of(number, of_prompt))
    return files


def tower_features(
    backbone: PreTrainedModel, made: list[tuple[list[int], dict[str, Tensor]]], device: torch.device
) -> list[Tensor]:
    """The features of all images, one after the other, [rows, H]: those that replace embeddings, then those for
    deeper layers (DeepStack), if the family has them."""
    named_alike = []
    for _, of_image in made:
        if "video_grid_thw" in of_image:
            of_image = {"pixel_values": of_image["pixel_values_videos"], "image_grid_thw": of_image["video_grid_thw"]}
        named_alike.append(of_image)
    inputs = joined(named_alike)
    features = backbone.get_image_features(**{name: x.to(device) for name, x in inputs.items()})
    layers = [torch.cat(tuple(features.pooler_output))]
    for of_images in features.get("deepstack_features", ()):
        layers.append(torch.cat(tuple(of_images)))
    return layers


def joined(inputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The inputs of several images as those of one call; {} for none."""
    if not inputs:
        return {}
    found = {}
    for name in inputs[0]:
        found[name] = torch.cat([of_image[name] for of_image in inputs])
    return found


def sources_of(tokens: Tensor, images: list[Image], config: PretrainedConfig) -> Tensor:
    """For each token of a sequence the row of the tower's features that replaces it, -1 for text: [length]."""
    rows = torch.cat([tokens[:0], *(image.rows for image in images)])
    is_image = tokens == config.image_token_id
    if any("video_grid_thw" in image.inputs for image in images):
        is_image |= tokens == config.video_token_id
    is_image &= is_image.cumsum(0) <= len(rows)                            # the policy may sample the token too
    source = torch.full_like(tokens, -1)
    source[is_image] = rows
    return source


def positions_of(backbone: PreTrainedModel, tokens: Tensor, is_image: Tensor, images: list[Image]) -> Tensor:
    """Positions [axes, length] of a sequence's tokens. Axes: time, height and width, or one."""
    rope = backbone.config.get_text_config().rope_parameters or {}
    if "mrope_section" not in rope:
        return torch.arange(len(tokens))[None]
    videos = [image.inputs for image in images if "video_grid_thw" in image.inputs]
    inputs = joined([image.inputs for image in images if "video_grid_thw" not in image.inputs]) | joined(videos)
    kinds = is_image.long()                                                 # 0: text, 1: image, 2: video
    if videos:
        kinds += is_image & (tokens == backbone.config.video_token_id)
    return backbone.get_rope_index(tokens[None], kinds[None], **inputs)[0][:, 0]
