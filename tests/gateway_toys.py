"""Small tokenizers of every shipped family, and model folders around them, for tests of the gateway."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from gateway.pieces import ALPHABET

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}<{{ c.function.name }}:{{ c.function.arguments | tojson }}>"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = ["ABC", "DEF", "GHI", "XYZ", " Paris", "Hello", " world", "ab", "\u201c", " a"]
SPECIAL = ["<unk>", "<s>", "</s>", "<end>"]
CORPUS = [
    "Hello world ( x ) the quick brown fox jumps over the lazy dog",
    "  two  spaces and a tab\tand a line\nbreak",
    "Paris is the capital of France; naïve café, 你好世界, привет мир",
    "def f(x):\n    return x + 1  # code",
] * 8


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges: text encodes to bytes, and ids of WORDS are there to be played."""
    vocab = {token: at for at, token in enumerate(SPECIAL)}
    letter = {byte: char for char, byte in ALPHABET.items()}
    for byte in range(256):
        vocab[letter[byte]] = len(vocab)
    for word in WORDS:
        vocab["".join(letter[byte] for byte in word.encode())] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it."""
    trainer_vocab = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    plain = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    alphabet = sorted({char for char in "".join(CORPUS).replace(" ", "\u2581") if ord(char) < 0x2600})
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=trainer_vocab,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    plain.train_from_iterator(CORPUS, trainer)
    config = json.loads(plain.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(config))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """Unigram with Metaspace, as T5 and XLNet have it."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """A family whose decoder is no concatenation of pieces (it cleans up spaces)."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


FAMILIES = {"byte_level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram, "word_piece": word_piece}


def write_model(
    folder: Path, tokenizer: tokenizers.Tokenizer, *, template: str = TEMPLATE, generation: dict[str, Any] | None = None
) -> Path:
    """A model folder without weights around a tokenizer. It ends answers with </s> and <end>."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    eos, end = (tokenizer.token_to_id(each) for each in ("</s>", "<end>"))
    generation = {"eos_token_id": [eos, end]} if generation is None else generation
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size, "eos_token_id": eos}))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder
