"""Trains the demo model on the docs and on questions.txt, and writes it as a Hugging Face directory.

    python -m tools.demo_model.train [--out DIR] [--steps N] [--threads N] [--device cuda] [--seed N] [--start-from DIR]

1. Corpus and tokenizer: a byte-level BPE is trained on the same text (corpus.py).
2. Training: a small Llama in plain torch (network.py), AdamW, loss on answers and passages only.
3. Weights are rounded to bfloat16 and *then* evaluated, because that is what is stored. Computed in float32 everywhere.
4. Exit code 1 when fewer than 98 % of the canonical questions and of the tool calls are right word for word, or fewer
   than 85 % of the answers that repeat a number; nothing is written then.

Invariants: same seed, same start, one thread, same machine and torch: same files. No network, no transformers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo_model import weather
from tools.demo_model.corpus import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    MARKERS,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM_PROMPTS,
    Questions,
    Sampler,
    Turn,
    load_docs,
    load_off_topic,
    load_topics,
    render,
    tools_text,
)
from tools.demo_model.network import Llama, Shape

HERE = Path(__file__).parent
QUESTIONS_FILE = HERE / "questions.txt"
OFF_TOPIC_FILE = HERE / "off_topic.txt"
REPOSITORY = HERE.parents[1]
DEMO_DIR = REPOSITORY / "engine" / "baton" / "models" / "demo"
PASS_ACCURACY = 0.98
PASS_COPIES = 0.85
"""Share of the answers with a number that must be right: a model of 3 M parameters gets some digits wrong."""
PASSAGE_SHARE = 0.12
WEATHER_SHARE = 0.35
BATCH_TOKENS = 2048
IGNORE = -100


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with all 256 bytes, so it encodes any text. Adds <|bos|> when special tokens are asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        got = tokenizer.get_vocab_size()
        raise ValueError(
            f"the corpus yields {got} tokens, Shape.vocab wants {vocab}; add text or lower it"
        )
    add_markers(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def add_markers(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])


def load_start(model: Llama, folder: Path) -> Tokenizer:
    """Weights and tokenizer of a demo model, which may be from before the markers: their rows stay as they are."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    add_markers(tokenizer)
    loaded = load_file(folder / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in loaded.items()}
    for name, known in model.state_dict().items():
        rows = weights[name]
        weights[name] = torch.cat((rows, known[len(rows) :])) if rows.dim() == 2 else rows
    model.load_state_dict(weights)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and for each position the id that must follow it, or IGNORE."""

    ids: list[int]
    targets: list[int]


def conversation_example(tokenizer: Tokenizer, turns: Sequence[Turn]) -> Example:
    """Loss on the assistant's words and the <|eos|> after them; the rest is given by the client."""
    ids: list[int] = []
    learned: list[bool] = []
    for index, turn in enumerate(turns):
        prefix = BOS if index == 0 else ""
        begin = f"{prefix}<|{turn.role}|>{turn.given}"
        head = tokenizer.encode(begin, add_special_tokens=False).ids
        body = tokenizer.encode(turn.text + EOS, add_special_tokens=False).ids
        ids += head + body
        is_learned = turn.role == "assistant" and turn.is_learned
        learned += [False] * len(head) + [is_learned] * len(body)
    targets = [token if use else IGNORE for token, use in zip(ids[1:], learned[1:], strict=True)]
    return Example(ids[:-1], targets)


def passage_example(tokenizer: Tokenizer, text: str) -> Example:
    ids = tokenizer.encode(BOS + text + EOS, add_special_tokens=False).ids
    return Example(ids[:-1], ids[1:])


def pad(examples: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    """int64 [rows, longest] ids and targets. Padding is on the right, where causal attention never looks."""
    longest = max(len(e.ids) for e in examples)
    ids = torch.tensor([e.ids + [pad_id] * (longest - len(e.ids)) for e in examples])
    targets = torch.tensor([e.targets + [IGNORE] * (longest - len(e.targets)) for e in examples])
    return ids, targets


def batches(
    examples: Iterator[Example], pad_id: int, tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of about `tokens` tokens with rows of similar length, so that little is padding."""
    generator = torch.Generator().manual_seed(0)
    while True:
        pool = sorted(itertools.islice(examples, 384), key=lambda e: len(e.ids))
        cut: list[list[Example]] = [[]]
        for example in pool:
            if cut[-1] and (len(cut[-1]) + 1) * len(example.ids) > tokens:
                cut.append([])
            cut[-1].append(example)
        for index in torch.randperm(len(cut), generator=generator).tolist():
            yield pad(cut[index], pad_id)


def answers_right(
    model: Llama, tokenizer: Tokenizer, prompts: Sequence[Sequence[Turn]], answers: Sequence[str]
) -> list[bool]:
    """Would greedy decoding after each prompt give exactly its answer and stop?

    One forward pass tells: greedy decoding yields the answer if and only if, with the answer given, each of its tokens
    (and the <|eos|>) is the most likely one at its place.
    """
    pad_id = tokenizer.token_to_id(PAD)
    right: list[bool] = []
    for start in range(0, len(prompts), 32):
        chunk = zip(prompts[start : start + 32], answers[start : start + 32], strict=True)
        examples = [
            conversation_example(tokenizer, [*prompt, Turn("assistant", answer)])
            for prompt, answer in chunk
        ]
        ids, targets = pad(examples, pad_id)
        for row, prompt in enumerate(prompts[start : start + 32]):  # only the last answer counts
            targets[
                row,
                : len(tokenizer.encode(render(prompt, ask=True), add_special_tokens=False).ids) - 1,
            ] = IGNORE
        with torch.inference_mode():
            guess = model.logits(model(ids.to(model.device))).argmax(dim=-1).cpu()
        right += ((guess == targets) | (targets == IGNORE)).all(dim=1).tolist()
    return right


def generate(model: Llama, tokenizer: Tokenizer, text: str, limit: int) -> tuple[str, bool]:
    """Greedy continuation of `text` (special tokens included) and whether it ended by itself within `limit` tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    begin, eos = len(ids), tokenizer.token_to_id(EOS)
    with torch.inference_mode():
        while len(ids) - begin < limit:
            given = torch.tensor([ids], device=model.device)
            ids.append(int(model.logits(model(given)[0, -1]).argmax()))
            if ids[-1] == eos:
                return tokenizer.decode(ids[begin:-1]), True
    return tokenizer.decode(ids[begin:]), False


def train(
    model: Llama, data: Iterator[tuple[Tensor, Tensor]], steps: int, peak_rate: float
) -> None:
    """AdamW, linear warm-up over 5 % of the steps, cosine decay to 1 %. Prints a line every 25 steps."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.98), fused=True)
    warm = max(1, steps // 20)
    begin, tokens, mean = time.monotonic(), 0, 0.0
    for step in range(steps):
        rate = min((step + 1) / warm, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * rate
        ids, targets = (tensor.to(model.device) for tensor in next(data))
        learned = targets != IGNORE
        loss = F.cross_entropy(model.logits(model(ids)[learned]), targets[learned])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += ids.numel()
        mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 25 == 0 or step + 1 == steps:
            spent = time.monotonic() - begin
            left = spent / (step + 1) * (steps - step - 1) / 60
            speed = tokens / spent
            print(
                f"step {step + 1}/{steps}  loss {mean:.4f}  {speed:.0f} tokens/s  {left:.1f} min left",
                flush=True,
            )


def weather_settings() -> dict[str, list[tuple[list[Turn], str]]]:
    """By setting, conversations with the tool and what must be said next."""
    rng = random.Random(1)
    settings: dict[str, list[tuple[list[Turn], str]]] = {}
    asked = [
        [
            Turn("system", tools_text(weather.draw_tools(rng))),
            Turn("user", weather.QUESTIONS[0].format(city)),
        ]
        for city in weather.CITIES
    ]
    calls = [weather.call_text(city) for city in weather.CITIES]
    reasoning = [weather.reasoning_text(city) for city in weather.CITIES]
    settings["weather, call"] = [
        (before, f"<think>\n{why}\n</think>\n\n{call}")
        for before, why, call in zip(asked, reasoning, calls, strict=True)
    ]
    answered = []
    for before, call, city in zip(asked, calls, weather.CITIES, strict=True):
        sky, degrees = rng.choice(weather.SKIES), rng.randint(1, 30)
        result = json.dumps({"temperature": degrees, "sky": sky})
        turns = [
            *before,
            Turn("assistant", call),
            Turn("user", f"<tool_response>\n{result}\n</tool_response>"),
        ]
        answered.append((turns, weather.answer_text(city, sky, degrees)))
    settings["weather, answer"] = answered
    return settings


def evaluate(model: Llama, tokenizer: Tokenizer, questions: Questions) -> dict[str, float]:
    """Print and return the shares of questions that are answered word for word, in several settings."""
    topics = questions.all_topics
    contexts: dict[str, list[list[Turn]]] = {
        "canonical": [[] for _ in topics],
        "with system prompt": [[Turn("system", SYSTEM_PROMPTS[0])] for _ in topics],
        "as second turn": [
            [Turn("user", t.questions[0]), Turn("assistant", t.answer)]
            for t in (topics[-1], *topics[:-1])
        ],
    }
    settings = {
        name: [
            ([*before, Turn("user", t.questions[0])], t.answer)
            for before, t in zip(context, topics, strict=True)
        ]
        for name, context in contexts.items()
    }
    settings |= weather_settings()
    settings["all phrasings"] = [([Turn("user", q)], t.answer) for t in topics for q in t.questions]
    settings["unseen phrasings"] = [
        ([Turn("user", q)], t.answer) for q, t in questions.unseen_phrasings
    ]
    settings["unseen, off topic"] = [
        ([Turn("user", q)], questions.off_topic.answer) for q in questions.unseen
    ]
    shares: dict[str, float] = {}
    for name, pairs in settings.items():
        prompts, answers = [p for p, _ in pairs], [a for _, a in pairs]
        right = answers_right(model, tokenizer, prompts, answers)
        shares[name] = sum(right) / len(right)
        print(f"{name}: {sum(right)}/{len(right)} answered word for word")
        for prompt in [p for p, ok in zip(prompts, right, strict=True) if not ok][:8]:
            said, ended = generate(model, tokenizer, render(prompt, ask=True), 80)
            print(f"    {prompt[-1].text!r} -> {said!r}{'' if ended else ' …'}")
    return shares


def save(model: Llama, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face directory: weights as bfloat16, everything else as transformers reads it."""
    shape = model.shape
    bos, eos, pad_id = (tokenizer.token_to_id(token) for token in (BOS, EOS, PAD))
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    rope = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad_id,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [
            token for token in SPECIAL_TOKENS if token not in (BOS, EOS, PAD)
        ],
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad_id}
    # Servers take the temperature from here when a request has none; transformers goes by do_sample.
    generation |= {"do_sample": False, "temperature": 0.0}
    files = {
        "config": config,
        "tokenizer_config": tokenizer_config,
        "generation_config": generation,
    }
    for name, content in files.items():
        (out / f"{name}.json").write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def round_weights(model: Llama) -> None:
    """Round every weight to bfloat16 in place: from here on the model computes what the checkpoint will compute."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m tools.demo_model.train`. Returns 1 when the model does not answer well enough."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.train",
        description="Train the demo model on the docs and questions.txt; write it to --out.",
    )
    parser.add_argument(
        "--out", type=Path, default=DEMO_DIR, help="directory to write (default: the built-in one)"
    )
    parser.add_argument(
        "--steps", type=int, default=1500, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--device", default="cpu", help="where torch computes (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and samples (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=2e-3, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        help="continue with this model and its tokenizer, as for some new answers (900 steps did)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="write the files even if the model fails the evaluation"
    )
    args = parser.parse_args(argv)
    if not (REPOSITORY / "docs").is_dir():
        parser.error(
            f"{REPOSITORY} has no docs to train on; run this from a checkout of the repository"
        )

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    questions = load_topics(QUESTIONS_FILE)
    pages = load_docs(REPOSITORY)
    shape = Shape()
    topics = questions.all_topics
    texts = ["\n\n".join(page) for page in pages] + [
        text for t in topics for text in (*t.questions, t.answer)
    ]
    model = Llama(shape)
    if args.start_from is None:
        tokenizer = train_tokenizer(texts, shape.vocab - len(MARKERS))
    else:
        tokenizer = load_start(model, args.start_from)
    model.to(args.device)
    phrasings, size = (
        sum(len(t.questions) for t in topics),
        sum(p.numel() for p in model.parameters()),
    )
    print(
        f"{len(topics)} answers, {phrasings} questions, {len(pages)} pages; {size / 1e6:.2f} M parameters",
        flush=True,
    )

    samples = Sampler(questions, load_off_topic(OFF_TOPIC_FILE), pages, args.seed).samples(
        PASSAGE_SHARE, WEATHER_SHARE
    )
    examples = (
        passage_example(tokenizer, s) if isinstance(s, str) else conversation_example(tokenizer, s)
        for s in samples
    )
    train(model, batches(examples, tokenizer.token_to_id(PAD), BATCH_TOKENS), args.steps, args.rate)
    round_weights(model)
    shares = evaluate(model, tokenizer, questions)
    accuracy = min(shares["canonical"], shares["weather, call"])
    copies = shares["weather, answer"]
    passed = accuracy >= PASS_ACCURACY and copies >= PASS_COPIES
    if passed or args.keep:
        save(model, tokenizer, args.out)
        print(f"written to {args.out}")
    if not passed:
        print(
            f"failed: {accuracy:.1%} of the canonical questions and calls are right, {PASS_ACCURACY:.0%} needed; "
            f"{copies:.1%} of the answers with numbers, {PASS_COPIES:.0%} needed; raise --steps"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
