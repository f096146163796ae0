"""One rank of many on the stand-in for CUDA: `python -m tests.cuda.step_worker FOLDER RANK WORLD_SIZE`. FOLDER holds
models; what came out is printed as JSON. All other ranks hold what this one holds."""

import json
import os
import sys

from tests.cuda import fake_cuda

REFUSED = {                                                             # contract -> what breaks it
    "float32 attention": {"dtype": "float32"},
    "mixed dtypes": {"key_dtype": "float32"},
    "head_dim 20": {"head_dim": 20},
    "head_dim 264": {"head_dim": 264},
    "heads that do not divide": {"kv_heads": 3},
    "int64 offsets": {"offsets_dtype": "int64"},
    "offsets on the host": {"offsets_device": "cpu"},
    "strided last dimension": {"is_strided": True},
    "compute capability 7.5": {"capability": (7, 5)},
}


RESPONSES = [[5, 6, 7]] * 8 + [[9]] * 8, [[3 + i] * (1 + i % 4) for i in range(16)]    # prompts, responses


def attend(device, dtype="bfloat16", key_dtype=None, head_dim=16, kv_heads=2, offsets_dtype="int32",
           offsets_device="cuda", is_strided=False, capability=(9, 0)) -> list[float]:
    """Two sequences through the kernel that `packed_varlen` calls, each setting as given."""
    import torch

    from common.forward.attention import FEWER_KEY_HEADS, varlen_attn

    device.capability = capability
    query = torch.ones(5, 4, head_dim, dtype=getattr(torch, dtype), device="cuda")
    key, value = (torch.ones(5, kv_heads, head_dim, dtype=query.dtype, device="cuda") for _ in range(2))
    key = key.to(getattr(torch, key_dtype or dtype))
    if is_strided:
        query = torch.ones(5, head_dim, 4, dtype=query.dtype, device="cuda").transpose(1, 2)
    offsets = torch.tensor([0, 2, 5], dtype=getattr(torch, offsets_dtype), device=offsets_device)
    out = varlen_attn(query, key, value, offsets, offsets, 3, 3, window_size=(-1, 0), **FEWER_KEY_HEADS)
    device.capability = (9, 0)
    return out.double().cpu().flatten().tolist()


def multiply_in_8_bits(device, capability: tuple[int, int]) -> list[float]:
    import torch

    device.capability = capability
    a, b = (torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16).float().cpu()[0].tolist()


def kernel_error(device) -> tuple[float, dict[str, list[str]]]:
    """The largest difference between log-probs and entropies of bfloat16 operands on the device and in float64; and of
    each matrix product of both passes the dtypes of its results."""
    import torch

    from common.kernels import Head, linear_logp

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (40, 3000))
    targets, products, heard = torch.arange(40) * 7, {}, device.heard

    def hear(func, args, out):
        if "mm" in func._schema.name:
            products.setdefault(func._schema.name, []).append(str(out.dtype))

    device.heard = hear
    operands = hidden.cuda().requires_grad_(), weight.cuda().requires_grad_()
    ours = linear_logp(operands[0], Head(operands[1]), targets.cuda())[:2]
    ours[0].sum().backward()
    device.heard = heard
    exact = linear_logp(hidden.double(), Head(weight.double()), targets)[:2]
    errors = [float((mine.detach().cpu() - want).abs().max()) for mine, want in zip(ours, exact)]
    return max(errors), {name: sorted({*dtypes}) for name, dtypes in products.items()}


def peak_of_gradients(device) -> float:
    """MiB above what is there while autograd adds up three gradients of 4 MiB each."""
    import torch

    x = torch.ones(2**20, device="cuda", requires_grad=True)
    total = (2 * x + 3 * x + 4 * x).sum()
    device.allocator.reset_peaks()
    before = device.allocator.allocated
    total.backward()
    assert x.grad.cpu().unique().tolist() == [9.0]
    return (device.allocator.peak_allocated - before) / 2**20


def contracts(device) -> dict[str, str]:
    """What is said of each call that a kernel refuses; empty where it is accepted."""
    import torch

    said = {}
    calls = {"accepted": lambda: attend(device)}
    calls |= {name: lambda settings=settings: attend(device, **settings) for name, settings in REFUSED.items()}
    half, single = (torch.ones(2, 2, dtype=dtype, device="cuda") for dtype in (torch.bfloat16, torch.float32))
    calls |= {
        "products accepted": lambda: torch.mm(half, half, out_dtype=torch.float32),
        "products of two dtypes": lambda: half @ single,
        "out_dtype float64": lambda: torch.mm(single, single, out_dtype=torch.float64),
        "out_dtype of two dtypes": lambda: torch.mm(half, single, out_dtype=torch.float32),
        "8 bits accepted": lambda: multiply_in_8_bits(device, (8, 9)),
        "8 bits on compute capability 8.6": lambda: multiply_in_8_bits(device, (8, 6)),
        "a tensor on the host": lambda: half + torch.ones(2, 2),
        "numpy": lambda: half.float().numpy(),
        "pinned on the device": lambda: torch.empty(2, device="cuda", pin_memory=True),
    }
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            said[name] = str(error)
        device.capability = (9, 0)
    return said


def step(folder: str, world, device) -> dict:
    """Forward, backward and optimizer step of a policy and a critic; the gathered weights."""
    import torch
    from torch.distributed.tensor import DTensor

    from common.batch import Batch
    from common.model.loading import load_critic, load_policy
    from common.model.optimizers import make_optimizer
    from common.model.policy import ModelConfig
    from common.optim import OptimConfig, optimizer_step

    found = {}
    batch = Batch.build(*RESPONSES)
    for name in ("tied", "untied"):
        path = f"{folder}/{name}"
        config = ModelConfig(gradient_checkpointing=True, share_prompt=name == "tied")
        policy, critic = load_policy(path, config, world), load_critic(path, config, world)
        optimizer = make_optimizer(policy, OptimConfig())
        mine = batch.to(world.device, share_prompt=config.share_prompt)
        device.reads.clear()
        logp, entropy = policy(mine, 1.0)
        whole = [key for key, p in policy.lm.get_decoder().layers.named_parameters() if not isinstance(p, DTensor)]
        (world.size * (logp.sum() + entropy.sum())).backward()             # FSDP averages: undo it
        reads = dict(device.reads)
        norm = optimizer_step(policy, optimizer, 1e-3, OptimConfig())
        value = critic(mine)
        value.sum().backward()
        rows = {key: len(p.to_local()) for key, p in policy.lm.named_parameters()}
        shards = {key: (p.to_local().bfloat16(), tuple(p.shape)) for key, p in policy.lm.named_parameters()}
        equal = []
        for key, full in policy.full_tensors(torch.bfloat16):
            shard, shape = shards[key]
            place = slice(world.rank * len(shard), (world.rank + 1) * len(shard))
            assert full.device.type == "cuda", key
            equal.append(full[place].equal(shard) and tuple(full.shape) == shape)
        found[name] = {
            "norm": norm, "logp": logp.detach().cpu().tolist(), "value": value.detach().cpu().tolist(),
            "rows": rows, "gathered": all(equal), "num_gathered": len(equal), "reads": reads, "whole": whole,
        }
    return found


def main(folder: str, rank: str, world_size: str) -> None:
    os.environ |= {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    device = fake_cuda.install()
    from common.parallel import ranks

    world = ranks.init()
    with device:
        result = {"step": step(folder, world, device)}
        result["kernel_error"], result["products"] = kernel_error(device)
        result["contracts"] = contracts(device) if world.size == 1 else {}
        result["gradients"] = peak_of_gradients(device)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
