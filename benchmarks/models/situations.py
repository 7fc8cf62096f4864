"""Situations in which libraries use a Hugging Face model, for ``benchmarks.models.libraries``. Each trains or
evaluates a tiny model on a CPU as the library's users do. Nothing is downloaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from coda_agent import fused

Patch = Callable[..., Any]
Results = dict[str, Tensor]
# Limits on relative errors. In fp32 the two models compute the same sums in different orders. AdamW divides
# each gradient by its own size, so the rounding error of a tiny gradient becomes an error of a whole step. A
# value that rounds the other way to float8 changes a tiny model's gradients by 3%; without float8 they would
# change by 10%.
EXACT, ADAMW, FLOAT8 = 1e-5, 1e-3, 5e-2
STEPS, VOCABULARY, IGNORED = 3, 64, -100
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {"Llama": {}, "Mistral": {"sliding_window": 6}, "Qwen3": {}}
FAMILIES |= {"Qwen2": {"tie_word_embeddings": True}, "Gemma": {"num_key_value_heads": 1}}


class Situation(NamedTuple):
    """``run`` takes a patch and returns what to compare: each key is a kind of tensor, or "kind/name". If
    ``rounded``, ``run`` also takes ``bf16``. If ``runs_fused``, at least one fused program must run."""

    library: str
    name: str
    run: Callable[..., Results]
    limit: float
    rounded: bool
    runs_fused: bool


SITUATIONS: list[Situation] = []  # of several decorators, Python applies the last one first


def situation(library: str, name: str, limit: float = EXACT, **more: Any) -> Callable[[Any], Any]:
    """Add a function, called with ``more``, to the situations."""
    rounded, runs_fused = more.pop("rounded", False), more.pop("runs_fused", True)

    def add(run: Callable[..., Results]) -> Callable[..., Results]:
        SITUATIONS.append(Situation(library, name, partial(run, **more), limit, rounded, runs_fused))
        return run

    return add


def change(library: str, name: str, limit: float = EXACT, **more: Any) -> Callable[[Any], Any]:
    """Add two situations in which a function, called with a model and ``more``, changes the model before it
    trains: one is patched before the change, one after. The function returns the changed model, or None."""
    runs_fused, then = more.pop("runs_fused", True), more.pop("then", trained)

    def add(alter: Callable[..., Any]) -> Callable[..., Any]:
        def run(patch: Patch, late: bool) -> Results:
            altered, alters = model(), partial(alter, **more)
            for step in (alters, patch) if late else (patch, alters):
                result = step(altered)
                altered = result if isinstance(result, nn.Module) else altered
            return then(altered)

        for when, late in (("before", False), ("after", True)):
            situation(library, f"{name}, patched {when}", limit, runs_fused=runs_fused, late=late)(run)
        return alter

    return add


# Models, and what is compared


def model(family: str = "Llama", auto: str = "AutoModelForCausalLM", **more: Any) -> Any:
    """A model of two layers in training mode. All weights are random, including norms and biases."""
    transformers = import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | more)
    random = getattr(transformers, auto).from_config(config)
    with torch.no_grad():
        for parameter in random.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return random.train()


def patched(patch: Patch, *args: Any, **more: Any) -> Any:
    result = model(*args, **more)
    patch(result)
    return result


def windows(seed: int, rows: int = 4, length: int = 16) -> tuple[Tensor, Tensor]:
    """Token ids and labels [rows, length]. Some labels are ignored, among them all of the first row."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=random)
    labels = torch.where(torch.rand(rows, length, generator=random) < 0.3, IGNORED, ids)
    labels[0] = IGNORED
    return ids, labels


def named(kind: str, tensors: Mapping[Any, Any]) -> Results:
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return {f"{kind}/{n}": t.detach().clone() for n, t in whole.items()}


def weights(model: nn.Module) -> Results:
    return named("weights", {n: p for n, p in model.named_parameters() if p.requires_grad})


def gradients(model: nn.Module) -> Results:
    return named("gradients", {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@torch.no_grad()
def logits(model: Any, kind: str = "logits", **more: Any) -> Results:
    """Logits in evaluation, outside and inside of ``fused.frozen``, where the second call reads copies."""
    call = partial(model.eval(), input_ids=windows(99)[0], use_cache=False, **more)
    results = {kind: call().logits.clone()}
    with fused.frozen(model):
        return results | {f"{kind}/frozen {n}": call().logits.clone() for n in range(2)}


def trained(
    model: Any, optimizer: Any = None, backward: Any = Tensor.backward, lr: float = 0.05, **inputs: Tensor
) -> Results:
    """Train for some steps. Return the losses, the last step's gradients, and then logits in evaluation."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses, last = [], Results()
    for step in range(STEPS):
        ids, labels = windows(step)
        loss = model(**{"input_ids": ids, "labels": labels, "use_cache": False} | inputs).loss
        backward(loss)
        last = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **last, **logits(model)}


def arguments(cls: Any, folder: str, **more: Any) -> Any:
    basic: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1}
    basic |= {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "save_strategy": "no", "seed": 3}
    basic |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return cls(output_dir=folder, **basic | more)


def logged(trainer: Any, **how: Any) -> Results:
    """Train; return what the trainer logged, and the trained weights."""
    trainer.train(**how)
    kinds = ("loss", "grad_norm", "eval_loss", "reward", "rewards/margins")
    lines = {kind: [line[kind] for line in trainer.state.log_history if kind in line] for kind in kinds}
    return {n.partition("/")[0]: torch.tensor(v) for n, v in lines.items() if v} | weights(trainer.model)


# transformers


@situation("transformers", "Trainer, evaluation between steps, keep_reordered", ADAMW, evaluates=True)
@situation("transformers", "Trainer, bf16", rounded=True)
@situation("transformers", "Trainer, torch_compile by aot_eager", ADAMW, torch_compile_backend="aot_eager")
@situation("transformers", "Trainer, SGD, attention_dropout", optim="sgd", config={"attention_dropout": 0.2})
@situation("transformers", "Trainer, NEFTune", ADAMW, neftune_noise_alpha=5.0)
@situation("transformers", "Trainer, gradient checkpointing", ADAMW, gradient_checkpointing=True)
@situation("transformers", "Trainer, label smoothing", ADAMW, label_smoothing_factor=0.1)
@situation("transformers", "Trainer, Qwen2", ADAMW, config={"family": "Qwen2"})
@situation("transformers", "Trainer, a step without targets", ADAMW, targets=False, max_steps=1)
@situation("transformers", "Trainer, resumed from a checkpoint", ADAMW, resumes=True)
@situation("transformers", "Trainer, gradient accumulation, a window without targets", ADAMW)
def trains_by_trainer(
    patch: Patch,
    config: Any = None,
    evaluates: bool = False,
    targets: bool = True,
    resumes: bool = False,
    **more: Any,
) -> Results:
    transformers = import_module("transformers")
    pairs = [pair for seed in range(3) for pair in zip(*windows(seed), strict=True)]
    data = [{"input_ids": i, "labels": t if targets else torch.full_like(t, IGNORED)} for i, t in pairs]
    more |= {"eval_strategy": "steps", "eval_steps": 1} if evaluates else {}
    more |= {"save_strategy": "steps", "save_steps": 2} if resumes else {}

    def trainer(folder: str) -> Any:
        trainee = patched(partial(patch, keep_reordered=True) if evaluates else patch, **config or {})
        args = arguments(transformers.TrainingArguments, folder, **more)
        return transformers.Trainer(trainee, args, train_dataset=data, eval_dataset=data[:4])

    with tempfile.TemporaryDirectory() as folder:
        first = trainer(folder)
        results = logged(first) | {"logits": torch.tensor(first.predict(data[:4]).predictions)}
        again = {"resume_from_checkpoint": f"{folder}/checkpoint-2"}
        return logged(trainer(folder), **again) if resumes else results


@situation("transformers", "generate(): caches, left padding, beams, sampling; all families")
def generates(patch: Patch) -> Results:
    modes: dict[str, Any] = {"dynamic": {}, "static": {"cache_implementation": "static"}}
    modes |= {"beams": {"num_beams": 3}, "sampled": {"do_sample": True}, "no cache": {"use_cache": False}}
    ids, _ = windows(0, 2, 10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    how = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    results = Results()
    for family in FAMILIES:
        writer = patched(patch, family).eval()
        texts = {f"{family}, {mode}": writer.generate(ids, **how | more) for mode, more in modes.items()}
        results |= named("tokens", texts)
    return results


@situation("transformers", "generate(): prompt lookup, prefill in chunks; generate_batch()")
def generates_otherwise(patch: Patch) -> Results:
    writer, ids = patched(patch).eval(), windows(0, 1, 6)[0].repeat(1, 3)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    masked = partial(writer.generate, ids, attention_mask=torch.ones_like(ids), **how)
    prompts = [ids[0, :length].tolist() for length in (5, 9, 18)]
    config = import_module("transformers").GenerationConfig(**how)
    batch = writer.generate_batch(prompts, config, progress_bar=False)
    texts = {name: torch.tensor(each.generated_tokens) for name, each in batch.items()}
    texts |= {"lookup": masked(prompt_lookup_num_tokens=3), "chunks": masked(prefill_chunk_size=5)}
    return named("tokens", texts)


@change("transformers", "gradient_checkpointing_enable()", use_reentrant=False)
@change("transformers", "gradient_checkpointing_enable(), reentrant", use_reentrant=True)
def checkpoints(model: Any, **how: Any) -> None:
    model.gradient_checkpointing_enable(how)


@change("transformers", "resize_token_embeddings() to 75, eager attention, fp64 and back")
def converts(model: Any) -> None:
    model.resize_token_embeddings(75)  # which no kernel takes
    model.set_attn_implementation("eager")
    model.to(torch.float64).to(torch.float32)


@situation("transformers", "packed sequences")
def packs(patch: Patch) -> Results:
    ids, labels = (t.reshape(1, -1) for t in windows(0))
    positions = torch.cat([torch.arange(n) for n in (20, 4, 40)])[None]
    return trained(patched(patch), input_ids=ids, labels=labels, position_ids=positions)


@situation("transformers", "AutoModelForSequenceClassification")
def classifies(patch: Patch) -> Results:
    trainee = patched(patch, auto="AutoModelForSequenceClassification", num_labels=4)
    return trained(trainee, labels=torch.arange(4))


# trl

PAIRS, ONLINE = {"chosen": 8, "rejected": 6}, {"prompt": 5}  # how many words each column's texts have
COLUMNS = {"SFT": {"prompt": 5, "completion": 8}, "KTO": {"prompt": 5, "completion": 8}, "Reward": PAIRS}
COLUMNS |= {"DPO": PAIRS | ONLINE, "RLOO": ONLINE, "GRPO": ONLINE}


def tokenizer() -> Any:
    tokenizers = import_module("tokenizers")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    return import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=words, **special)


def texts(algorithm: str) -> Any:
    random = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (length,), generator=random).tolist())

    rows = [{n: text(length) for n, length in COLUMNS[algorithm].items()} for _ in range(12)]
    data = import_module("datasets").Dataset.from_list(rows)
    return data.add_column("label", [i % 2 == 0 for i in range(12)]) if algorithm == "KTO" else data


def rewards(completions: Any, **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) % 7 for word in text.split())) for text in completions]


@situation("trl", "RewardTrainer", ADAMW, algorithm="Reward")
@situation("trl", "KTOTrainer", ADAMW, algorithm="KTO")
@situation("trl", "GRPOTrainer", ADAMW, algorithm="GRPO", beta=0.1)
@situation("trl", "RLOOTrainer", ADAMW, algorithm="RLOO")
@situation("trl", "DPOTrainer, LoRA of q_proj", ADAMW, algorithm="DPO", adapts=["q_proj"])
@situation("trl", "DPOTrainer", ADAMW, algorithm="DPO")
@situation("trl", "SFTTrainer, bf16", rounded=True)
@situation("trl", "SFTTrainer, packing", ADAMW, packing=True, packing_strategy="wrapped", max_length=16)
@situation("trl", "SFTTrainer, loss=False", ADAMW, how={"loss": False})
@situation("trl", "SFTTrainer", ADAMW)
def trains_by_trl(
    patch: Patch, algorithm: str = "SFT", how: Any = None, adapts: Any = None, bf16: bool = False, **more: Any
) -> Results:
    trl, online = import_module("trl"), algorithm in ("RLOO", "GRPO")
    if online:
        more |= {"num_generations": 4, "max_completion_length": 8, "per_device_train_batch_size": 4}
    auto = "AutoModelForSequenceClassification" if algorithm == "Reward" else "AutoModelForCausalLM"
    with tempfile.TemporaryDirectory() as folder:
        random = model(auto=auto, num_labels=1)
        random.save_pretrained(folder)  # a trainer reads its reference model from there
        trainee = type(random).from_pretrained(folder)
        patch(trainee, **how or {})
        trainer = getattr(trl, f"{algorithm}Trainer")(
            model=lora(trainee, target_modules=adapts) if adapts else trainee,
            args=arguments(getattr(trl, f"{algorithm}Config"), folder, bf16=bf16, **more),
            train_dataset=texts(algorithm),
            processing_class=tokenizer(),
            **{"reward_funcs": rewards} if online else {},
        )
        results = logged(trainer)
    if algorithm == "RLOO":  # its loss is a sum of advantages, which is 0 but for rounding
        del results["loss"]
    return results


# peft


@change("peft", "LoRA")
@change("peft", "LoRA of q_proj, dropout", target_modules=["q_proj"], lora_dropout=0.3)
@change("peft", "LoRA of q_proj, lm_head trained too", target_modules=["q_proj"], modules_to_save=["lm_head"])
@change("peft", "DoRA", use_dora=True)
def lora(model: Any, **more: Any) -> Any:
    how = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False} | more
    return prompts(model, kind="Lora", **how)


@change("peft", "IA3", kind="IA3")
@change("peft", "AdaptionPrompt", kind="AdaptionPrompt", adapter_len=4, adapter_layers=1)
@change("peft", "prompt tuning", kind="PromptTuning", num_virtual_tokens=4)
@change("peft", "prefix tuning", kind="PrefixTuning", num_virtual_tokens=4)
def prompts(model: Any, kind: str, **more: Any) -> Any:
    peft = import_module("peft")
    return peft.get_peft_model(model, getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **more))


@situation("peft", "LoRA: disable_adapter, adapter_names, merge, unmerge, merge_and_unload, then train")
def merges(patch: Patch) -> Results:
    adapted = lora(model())
    patch(adapted)
    results = logits(adapted, "logits/adapted")
    with adapted.disable_adapter():
        results |= logits(adapted, "logits/disabled")
    results |= logits(adapted, "logits/mixed", adapter_names=["default", "__base__"] * 2)
    adapted.merge_adapter()
    results |= logits(adapted, "logits/merged")
    adapted.unmerge_adapter()
    results |= logits(adapted, "logits/unmerged")
    plain = adapted.merge_and_unload()
    results |= logits(plain, "logits/unloaded")
    return results | trained(plain.train().requires_grad_(True))


# accelerate


def new_accelerator(precision: str, **more: Any) -> Any:
    accelerate = import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, mixed_precision=precision, **more)


@situation(
    "accelerate", "prepare in bf16, clip_grad_norm_, unwrap_model, patched after", rounded=True, late=True
)
@situation("accelerate", "prepare in bf16, clip_grad_norm_, unwrap_model, patched before", rounded=True)
def prepares(patch: Patch, late: bool = False, bf16: bool = True) -> Results:
    accelerator, plain = new_accelerator("bf16" if bf16 else "no"), model()
    if not late:
        patch(plain)
    prepared, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    if late:
        patch(prepared)

    def backward(loss: Tensor) -> None:
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 0.5)

    results = trained(prepared, optimizer, backward)
    return results | logits(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), "logits unwrapped")


@situation("accelerate", "save_state, load_state")
def loads_state(patch: Patch) -> Results:
    accelerator, plain = new_accelerator("no"), patched(patch)
    prepared, optimizer = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    )
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        first = trained(prepared, optimizer, accelerator.backward)
        accelerator.load_state(folder)
        again = trained(prepared.train(), optimizer, accelerator.backward)
    assert all(torch.equal(first[name], again[name]) for name in first)
    return again


@change("accelerate", "cpu_offload", runs_fused=False, then=logits)
def offloads(model: Any) -> None:
    import_module("accelerate").cpu_offload(model.eval(), execution_device=torch.device("cpu"))


# bitsandbytes and torchao


def of_mlp(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and ".mlp." in name


@situation("bitsandbytes", "AdamW8bit", ADAMW)
def trains_in_8_bits(patch: Patch) -> Results:
    trainee, optim = patched(patch), import_module("bitsandbytes").optim
    return trained(trainee, optim.AdamW8bit(trainee.parameters(), lr=1e-3, min_8bit_size=1024))


@change("bitsandbytes", "Linear8bitLt in the MLP", kind="Linear8bitLt", has_fp16_weights=False)
@change("bitsandbytes", "Linear4bit in the MLP", kind="Linear4bit", quant_type="nf4")
def quantizes_mlp(model: Any, kind: str, **more: Any) -> None:
    cls = getattr(import_module("bitsandbytes").nn, kind)
    for name, linear in [(n, m) for n, m in model.named_modules() if of_mlp(m, n)]:
        narrow = cls(linear.in_features, linear.out_features, bias=False, **more)
        narrow.load_state_dict(linear.state_dict())
        model.set_submodule(name, narrow.to("cpu").requires_grad_(False))


@situation("torchao", "Int8WeightOnlyConfig of the MLP, after patch and a call", filter_fn=of_mlp)
@situation("torchao", "Int8WeightOnlyConfig of all projections, after patch and a call")
def quantizes(patch: Patch, **which: Any) -> Results:
    quantization, narrowed = import_module("torchao.quantization"), patched(patch)
    results = logits(narrowed, "logits/before")
    quantization.quantize_(narrowed, quantization.Int8WeightOnlyConfig(), **which)
    return results | logits(narrowed, "logits/after")


@situation("torchao", "QAT of the MLP's weights in int4, prepare and convert")
def trains_aware(patch: Patch) -> Results:
    quantization, trainee = import_module("torchao.quantization"), patched(patch)
    how = {"weight_dtype": getattr(torch, "int4"), "granularity": quantization.PerGroup(32)}  # noqa: B009
    for step in ("prepare", "convert"):
        config = quantization.qat.QATConfig(quantization.IntxWeightOnlyConfig(**how), step=step)
        quantization.quantize_(trainee, config, filter_fn=of_mlp)
        if step == "prepare":
            results = trained(trainee, lr=0.0)  # a changed weight could round the other way
    return results | logits(trainee, "logits converted")


@change("torchao", "float8 training of the MLP, emulated", FLOAT8)
def to_float8(model: Any) -> None:
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=of_mlp)


# torch


@cache
def mesh() -> Any:
    """A device mesh of this process alone."""
    dist: Any = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return dist.device_mesh.init_device_mesh("cpu", (1,))


@change("torch", "fully_shard")
def shards(model: Any) -> None:
    for module in (*model.model.layers, model):
        import_module("torch.distributed.fsdp").fully_shard(module, mesh=mesh())


@change("torch", "FullyShardedDataParallel")
def shards_flat(model: Any) -> Any:
    mesh()
    cls = import_module("torch.distributed.fsdp").FullyShardedDataParallel
    return cls(model, use_orig_params=True, device_id=torch.device("cpu"))


@change("torch", "DistributedDataParallel")
def replicates(model: Any) -> Any:
    mesh()
    return nn.parallel.DistributedDataParallel(model)


@change("torch", "parallelize_module")
def splits(model: Any) -> None:
    parallel = import_module("torch.distributed.tensor.parallel")
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {f"model.layers.*.{name}": parallel.ColwiseParallel() for name in columns}
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan |= {f"model.layers.*.{name}": parallel.RowwiseParallel() for name in rows}
    parallel.parallelize_module(model, mesh(), plan)


@change("torch", "checkpoint_wrapper around each layer")
def wraps_layers(model: Any) -> None:
    wrapper = import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = wrapper.checkpoint_wrapper(layer)


@change("torch", "weight_norm and pruning")
def changes_weights(model: Any) -> None:
    for layer in model.model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.self_attn.k_proj)
        import_module("torch.nn.utils.prune").l1_unstructured(layer.mlp.up_proj, "weight", 0.3)


@change("torch", "compile(fullgraph=True), aot_eager")
def compiles(model: Any) -> None:
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")


@situation("torch", "export, not strict, any length", strict=False)
@situation("torch", "export, strict, any length", strict=True)
def exports(patch: Patch, strict: bool) -> Results:
    lengths: Any = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}, "use_cache": None}
    export = partial(torch.export.export, dynamic_shapes=lengths, strict=strict)
    program = export(patched(patch).eval(), (windows(0)[0],), {"use_cache": False}).module()
    return {"logits": program(windows(99, length=24)[0], use_cache=False).logits.detach()}


@situation("torch", "EMA by AveragedModel, keep_reordered")
def averages(patch: Patch) -> Results:
    swa, trainee = import_module("torch.optim.swa_utils"), patched(partial(patch, keep_reordered=True))
    average, results = swa.AveragedModel(trainee, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9)), Results()
    for turn in range(2):
        results |= trained(trainee.train())
        average.update_parameters(trainee)
        results |= logits(average, f"logits/average {turn}")
    return results


@situation("torch", "autograd.graph.save_on_cpu, optimizer steps in the backward, tied embeddings")
def steps_in_backward(patch: Patch) -> Results:
    trainee = patched(patch, "Qwen2")

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter -= 0.05 * parameter.grad
        parameter.grad = None

    for parameter in trainee.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with torch.autograd.graph.save_on_cpu():
        return trained(trainee) | weights(trainee)


@situation("torch", "func.functional_call with other weights")
def calls_functionally(patch: Patch) -> Results:
    plain, (ids, labels) = patched(patch, "Gemma"), windows(0)
    other = {n: (p.detach() * 1.1).requires_grad_() for n, p in plain.named_parameters()}
    inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
    loss = torch.func.functional_call(plain, other, (), inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **named("gradients", {n: p.grad for n, p in other.items()})}


# liger-kernel


@situation("liger-kernel", "replaces the parts of a patched model, then patch", runs_fused=False, late=True)
@situation("liger-kernel", "replaces the classes, then a model is built and patched", runs_fused=False)
def yields(patch: Patch, late: bool = False) -> Results:
    """Liger's kernels need a GPU, so nothing runs. ``patch`` must say that PyTorch computes all parts."""
    plain, llama = patched(patch), import_module("transformers.models.llama.modeling_llama")
    causal = llama.LlamaForCausalLM
    with mock.patch.dict(vars(llama)), mock.patch.object(causal, "forward", causal.forward):
        import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(
            **{"model": plain} if late else {}
        )
        rows = patch(plain if late else model()) or ()
    return {"parts that run fused": torch.tensor(sum(row.runs == "fused" for row in rows))}
