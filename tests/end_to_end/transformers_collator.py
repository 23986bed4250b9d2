"""Dataset of tokens, and data collators of transformers with a tokenizer that needs no download."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorWithPadding, DefaultDataCollator, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0, "a": 1})), pad_token="[PAD]")
collate = DataCollatorWithPadding(tokenizer)
plain = DefaultDataCollator()
tokens = [{"input_ids": [index, 1, 2], "label": index} for index in range(8)]
