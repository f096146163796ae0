"""Oracles for conversations with images: transformers' own processor and models, one conversation at a time."""

import re
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from common.dataset.images import load_processor
from envs.pictures import decode


def seen(model: str, messages: list[dict[str, str]], files: list[bytes], **options: Any) -> dict[str, torch.Tensor]:
    """What a model gets of a conversation with `<image>` in its texts. `options`: of the chat template."""
    processor, _ = load_processor(model)
    parted = []
    for message in messages:
        parts = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part}
                 for part in re.split("(<image>)", message["content"]) if part]
        parted.append(message | {"content": parts})
    text = processor.apply_chat_template(parted, **options)
    inputs = processor(text=[text], images=decode(files) or None, return_tensors="pt")
    placeholder = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    found = {name: x for name, x in inputs.items() if name == "input_ids" or "pixel" in name or "grid" in name}
    return found | {"mm_token_type_ids": (inputs["input_ids"] == placeholder).long()}


def is_answer(model: str, tokens: list[int], first: int = 0) -> list[bool]:
    """Whether each token is of a message of the assistant, its end included, from message `first` on; those of pictures
    are not."""
    processor, _ = load_processor(model)
    names = processor.tokenizer.convert_ids_to_tokens(tokens)
    found, number, inside, role = [], -1, False, ""
    for name in names:
        inside |= role == "assistantĊ" and number >= first
        role += name
        if name == "<|im_start|>":
            number, role = number + 1, ""
        is_picture = name.startswith(("<|vision", "<|image", "<img>", "</img>", "<IMG"))
        found.append(inside and not is_picture)
        inside &= name != "<|im_end|>"
    return found


def language_model(model: str) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()


def logps(lm: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-prob of each token but the first: [length - 1]."""
    tokens = inputs["input_ids"][0]
    return lm(**_in_float64(lm, inputs)).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def classifier(lm: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """transformers' generic classifier on an image-text model with these weights: it has none of its own for them."""
    kind = type("Classifier", (GenericForSequenceClassification, type(lm).__mro__[1]), {})
    config = lm.config
    config.num_labels = 1
    model = kind(config).double().eval()
    model.load_state_dict({name: x.double() for name, x in weights.items()}, strict=True)
    return model


def reward(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The classifier's number for a conversation."""
    return model(**_in_float64(model, inputs)).logits[0, 0]


def states_values(model: PreTrainedModel, inputs: dict[str, torch.Tensor], response: list[int]) -> torch.Tensor:
    """The classifier's number for the tokens before each token of a response to the prompt `inputs`."""
    inputs = dict(inputs)
    tokens = torch.tensor([response])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], tokens], dim=1)
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(tokens)], dim=1)
    states = model.model(**_in_float64(model, inputs)).last_hidden_state[0]
    return model.score(states)[-len(response) - 1 : -1, 0]


def _in_float64(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that the model's family takes."""
    found = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    if "Qwen" not in type(model.base_model).__name__:
        found.pop("mm_token_type_ids")
    return found
