"""The paper's LSTM for sentences with a blank."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import ALIGNED
from fastweights.nn.encoders.base import Encoder, register_encoder
from fastweights.utils.settings import Settings, option
from fastweights.utils.tokens import BLANK, PAD

WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""The parameters of a layer, in the order that torch wants them."""


@dataclass(frozen=True)
class LSTMSettings(Settings):
    layers: int = option(2, at_least=1, at_most=1000)
    """Layers of the LSTM."""
    embedding: int = option(300, at_least=1, at_most=10**6)
    """Width of the word embeddings."""
    units: int = option(200, at_least=1, at_most=10**6)
    """Units in each layer."""
    readout: str = option("end", choices=("end", "blank"))
    """Where the state becomes the key: at the end of the sentence, or at the blank."""
    bidirectional: bool = option(False)
    """Whether a second LSTM reads the sentence from its end."""
    dropout: float = option(0.0, at_least=0, below=1)
    """Probability of dropping an activation in training."""


@register_encoder("lstm")
class LSTM(Encoder):
    """Words embedded and read by a stack of LSTM layers; the key is the top state at one place of the sentence.

    `readout` is "end", after the last word, or "blank", at the first missing word (in one direction that state has
    only seen the words to the left). With `bidirectional`, a second stack reads the sentence backwards and the two
    states are concatenated: each at its end, or both at the blank. `dropout` is on embeddings, between layers and on
    the key.

    Our choices: embeddings start from a unit normal, weights by He's method, the forget gate's bias at 1 and the
    others at 0, as was the default of the framework the paper used.
    """

    Settings = LSTMSettings
    reads_text = True
    vmappable = False

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """The paper's sizes: 200 units for one shot, 300 for more."""
        return {"units": 200 if shot == 1 else 300}

    def __init__(self, vocabulary: int, **options: Any) -> None:
        super().__init__()
        s = LSTMSettings(**options)
        self.at_blank = s.readout == "blank"
        self.embedding = nn.Embedding(vocabulary, s.embedding)
        self.ahead = _stack(s)
        self.back = _stack(s) if s.bidirectional else None
        self.dropout = nn.Dropout(s.dropout)
        self.item_shape, self.vocabulary = (None,), vocabulary  # sentences of any length
        self.width = s.units * (2 if s.bidirectional else 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) int32, padded at the end -> (B, width). Padding is read, but only after the key's place."""
        last = (tokens != PAD).sum(1).clamp(min=1) - 1
        place, blanks = last, tokens == BLANK
        if self.at_blank:  # the first one; the end of a sentence that has none
            place = torch.where(blanks.any(1), blanks.to(torch.uint8).argmax(1), last)
        words = self.dropout(self.embedding(tokens))
        keys = [pick(read(self.ahead, words), place)]
        if self.back is not None:
            mirrored = (last.unsqueeze(1) - torch.arange(tokens.shape[1], device=tokens.device)).clamp(min=0)
            reversed_words = words.gather(1, mirrored.unsqueeze(-1).expand_as(words))
            keys.append(pick(read(self.back, reversed_words), last - place if self.at_blank else last))
        return self.dropout(torch.cat(keys, dim=1))


def read(stack: nn.LSTM, words: Tensor) -> Tensor:
    """The top states (B, L, units) of a stack at every word (B, L, embedding)."""
    if stack.dropout and stack.training and words.is_cuda:
        return read_by_layers(stack, words)
    return stack(words)[0]


def read_by_layers(stack: nn.LSTM, words: Tensor) -> Tensor:
    """The same, layer by layer, with dropout by torch's generator in between.

    The random numbers of cuDNN's own dropout are a state that goes on from call to call: in a CUDA graph they would
    not be a function of the step any more.
    """
    start = words.new_zeros(1, words.shape[0], stack.hidden_size)
    for layer in range(stack.num_layers):
        if layer:
            words = F.dropout(words, stack.dropout)
        words, weights = without_bias(words, *(getattr(stack, f"{name}_l{layer}") for name in WEIGHTS))
        with warnings.catch_warnings():  # a part of the stack's weights is copied first, which costs next to nothing
            warnings.filterwarnings("ignore", "RNN module weights")
            words = torch.lstm(words, (start, start), weights, False, 1, 0.0, True, False, True)[0]
    return words


def without_bias(words: Tensor, to_gates: Tensor, recurrent: Tensor, *biases: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Words (B, L, inputs) followed by ones, and the weights of a layer with its biases as those of the first one.

    cuDNN takes a quarter of a step to sum a bias's gradient; as a weight's it is part of a product. Inputs are a
    multiple of what tensor cores want.
    """
    ones = 1 + -(words.shape[2] + 1) % ALIGNED
    bias = F.pad(torch.stack(biases).sum(0).unsqueeze(1), (0, ones - 1))
    return F.pad(words, (0, ones), value=1.0), [torch.cat([to_gates, bias], 1), recurrent]


def pick(states: Tensor, places: Tensor) -> Tensor:
    """Of states (B, L, units) the one at each sentence's place (B): (B, units)."""
    return states.gather(1, places.view(-1, 1, 1).expand(-1, 1, states.shape[2])).squeeze(1)


def _stack(s: LSTMSettings) -> nn.LSTM:
    dropout = s.dropout if s.layers > 1 else 0.0
    lstm = nn.LSTM(s.embedding, s.units, s.layers, batch_first=True, dropout=dropout)
    for name, parameter in lstm.named_parameters():
        if "weight" in name:
            nn.init.kaiming_normal_(parameter)
        else:
            nn.init.zeros_(parameter)
        if "bias_ih" in name:
            with torch.no_grad():
                parameter[s.units : 2 * s.units] = 1.0  # gates in the order input, forget, cell, output
    return lstm
