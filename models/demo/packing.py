"""Turns generated texts into rows of token ids: several documents a row, none of which sees another."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from models.demo.dialogue import END_OF_TEXT, END_OF_TURN, Document
from models.demo.generate import Text, as_text

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    input_ids: torch.Tensor  # [rows, row_length] int64
    labels: torch.Tensor  # [rows, row_length] int64, the next token or IGNORED
    position_ids: torch.Tensor  # [rows, row_length] int64, from 0 in every document
    attention_mask: torch.Tensor  # [rows, 1, row_length, row_length] bfloat16, 0 where one may look and -inf elsewhere


class Packer:
    """Fills rows with whole documents, first fit; a document longer than a row is left out."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterator[Text], rows: int, row_length: int) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._rows = rows
        self._row_length = row_length
        self._end_of_turn, self._end_of_text = (tokenizer.encode(end).ids[0] for end in (END_OF_TURN, END_OF_TEXT))
        self._answer_header = tokenizer.encode("<|im_start|>assistant\n").ids
        self._waiting: list[tuple[list[int], list[int]]] = []

    def next_batch(self) -> Batch:
        rows: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(self._rows)]
        room = [self._row_length] * self._rows
        misfits: list[tuple[list[int], list[int]]] = []
        while len(misfits) < 8:
            document = self._waiting.pop() if self._waiting else self._encode(next(self._texts))
            needed = len(document[0])
            if needed > self._row_length:
                continue
            row = next((row for row in range(self._rows) if room[row] >= needed), None)
            if row is None:
                misfits.append(document)
            else:
                rows[row].append(document)
                room[row] -= needed
        self._waiting = misfits
        return self._collate(rows)

    def _encode(self, text: Text) -> tuple[list[int], list[int]]:
        """Token ids and labels; the label at a position is the token after it, where that is to be learned."""
        if isinstance(text, Document):
            ids: list[int] = []
            learned: list[bool] = []
            for piece, is_learned in text.pieces:
                piece_ids = self._tokenizer.encode(piece).ids
                ids += piece_ids
                learned += [is_learned] * len(piece_ids)
            ids.append(self._end_of_text)
            learned.append(True)
        else:
            ids = self._tokenizer.encode(as_text(text)).ids
            learned = self._answers(ids)
        labels = [token if is_learned else IGNORED for token, is_learned in zip(ids, learned, strict=True)]
        return ids, [*labels[1:], IGNORED]

    def _answers(self, ids: list[int]) -> list[bool]:
        """True from the first token of each assistant turn to its end-of-turn token."""
        learned = [False] * len(ids)
        header = self._answer_header
        inside = False
        for at, token in enumerate(ids):
            learned[at] = inside
            starts = ids[max(0, at + 1 - len(header)) : at + 1] == header
            inside = starts or (inside and token != self._end_of_turn)
        return learned

    def _collate(self, rows: list[list[tuple[list[int], list[int]]]]) -> Batch:
        shape = (self._rows, self._row_length)
        input_ids = torch.full(shape, self._end_of_text)
        labels = torch.full(shape, IGNORED)
        position_ids = torch.zeros(shape, dtype=torch.int64)
        document_ids = torch.full(shape, -1)
        for row, documents in enumerate(rows):
            start = 0
            for number, (ids, wanted) in enumerate(documents):
                span = slice(start, start + len(ids))
                input_ids[row, span] = torch.tensor(ids)
                labels[row, span] = torch.tensor(wanted)
                position_ids[row, span] = torch.arange(len(ids))
                document_ids[row, span] = number
                start += len(ids)
        same_document = document_ids[:, :, None] == document_ids[:, None, :]
        visible = (same_document & torch.ones(self._row_length, self._row_length).tril().bool())[:, None]
        # A large finite number: -inf would turn a fully hidden row into NaN.
        mask = torch.zeros_like(visible, dtype=torch.bfloat16).masked_fill_(~visible, -1e9)
        return Batch(input_ids, labels, position_ids, mask)
