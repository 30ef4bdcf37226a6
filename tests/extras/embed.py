"""`embed`: sentence vectors from a model in a folder, and faiss's neighbours among them."""

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tfgrpo.runtime.embedders import NeighbourIndex, SentenceEncoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "late", "parcel", "refund", "please", "password"]
core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")
torch.manual_seed(0)
config = BertConfig(
    vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, max_position_embeddings=32,
)  # fmt: skip
model = BertModel(config)
model.save_pretrained("tiny")
tokenizer.save_pretrained("tiny")

vectors = SentenceEncoder("tiny").embed(["late parcel", "refund please", "password"])
assert vectors.shape == (3, 16)
assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
found, _ = NeighbourIndex(vectors, backend="faiss").search(vectors, 1)
assert [int(i) for (i,) in found] == [0, 1, 2], found
