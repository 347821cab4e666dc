"""Encoders: the sizes the paper implies, what they compute written out; neighbours and padding do not matter."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn.encoders import CNN, LSTM, ResNet, images_to_float
from fastweights.nn.encoders.lstm import read_by_layers
from fastweights.nn.init import SLOPE
from fastweights.utils.errors import UserError
from fastweights.utils.tokens import BLANK, PAD


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def images(count: int, side: int = 28, channels: int = 1) -> Tensor:
    return torch.randint(0, 256, (count, side, side, channels), dtype=torch.uint8)


def test_images_become_floats_from_0_to_1_with_channels_first() -> None:
    image = torch.tensor([[[[0, 51], [255, 102]]]], dtype=torch.uint8)
    expected = torch.tensor([[[[0.0, 1.0]], [[0.2, 0.4]]]])
    torch.testing.assert_close(images_to_float(image), expected)
    torch.testing.assert_close(images_to_float(image / 255), expected)


# ---- CNN


@pytest.mark.parametrize(("side", "filters", "width"), [(84, 32, 288), (28, 64, 64), (105, 8, 128)])
def test_pooling_rounds_up_to_the_papers_key_width(side: int, filters: int, width: int) -> None:
    encoder = CNN((side, side, 1), filters=filters)
    assert encoder.width == width
    assert encoder(images(2, side)).shape == (2, width)


@pytest.mark.parametrize("batch_norm", [0, 1, 3])
def test_the_cnn_is_convolution_norm_activation_and_pooling(batch_norm: int) -> None:
    encoder = CNN((12, 12, 1), filters=4, layers=3, batch_norm=batch_norm)
    assert len(encoder.norms) == batch_norm
    batch = images(5, 12)
    x = images_to_float(batch)
    for i, convolution in enumerate(encoder.convolutions):
        x = convolution(x)
        if i < batch_norm:
            x = F.batch_norm(x, None, None, training=True)
        x = F.max_pool2d(F.leaky_relu(x, SLOPE), 2, ceil_mode=True)
    torch.testing.assert_close(encoder(batch), x.flatten(1))


def test_weights_start_by_hes_method() -> None:
    weight = CNN((28, 28, 1), filters=64).convolutions[1].weight
    torch.testing.assert_close(weight.std(), torch.tensor((2 / (1.04 * 64 * 9)) ** 0.5), rtol=0.02, atol=0)


# ---- ResNet


def test_the_resnet_halves_84_pixels_to_6_and_ends_in_a_mean() -> None:
    encoder = ResNet((84, 84, 3), blocks=(2, 3, 4, 5), features=7)
    sides = []
    for block in encoder.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: sides.append(tuple(output.shape[1:])))
    keys = encoder(images(2, 84, 3))
    assert sides == [(2, 42, 42), (3, 21, 21), (4, 11, 11), (5, 6, 6)]
    assert keys.shape == (2, encoder.width) == (2, 7)


def test_a_residual_block_written_out() -> None:
    encoder = ResNet((12, 12, 1), blocks=(3, 4), features=5)
    batch = images(4, 12)
    x = images_to_float(batch)
    for block in encoder.blocks:
        inside = x
        for convolution in [layer for layer in block.convolutions if isinstance(layer, nn.Conv2d)]:
            inside = F.leaky_relu(F.batch_norm(convolution(inside), None, None, training=True), 0.1)
        x = F.max_pool2d(inside + block.shortcut(x), 2, ceil_mode=True)
    expected = F.leaky_relu(F.batch_norm(encoder.mix(x), None, None, training=True), 0.1).mean((2, 3))
    torch.testing.assert_close(encoder(batch), expected)


def test_dropout_drops_what_it_says() -> None:
    encoder = ResNet((16, 16, 1), blocks=(32,), features=4, dropout=0.1)
    seen: list[Tensor] = []
    encoder.blocks[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    batch = images(50, 16)
    encoder(batch)
    encoder.eval()(batch)
    assert (seen[0] == 0).float().mean() == pytest.approx(0.1, abs=0.01)
    assert not (seen[1] == 0).any()


@pytest.mark.parametrize(("layers", "width"), [(1, 7 * 7), (2, 3 * 3), (3, 1)])
def test_pooling_that_rounds_down_leaves_out_the_last_row(layers: int, width: int) -> None:
    """By hand: convolution, batch norm, ReLU and pooling, 15-7-3-1 pixels; in a pass and by the parts of a layer."""
    encoder, batch = CNN((15, 15, 1), filters=4, layers=layers, slope=0.0, pooling="down"), images(6, 15)
    x = by_parts = images_to_float(batch)
    for layer, convolution in enumerate(encoder.convolutions):
        x = F.max_pool2d(F.batch_norm(convolution(x), None, None, training=True).relu(), 2)
        by_parts = encoder.join(encoder.pre_activation(by_parts, layer).relu(), by_parts, layer)
    assert encoder.width == 4 * width
    torch.testing.assert_close(encoder(batch), x.flatten(1))
    torch.testing.assert_close(by_parts, x)


def test_layers_that_leave_no_pixel_are_refused() -> None:
    with pytest.raises(UserError, match="5 layers leave nothing of 28x28 pixels"):
        CNN((28, 28, 1), pooling="down")


def test_dropout_of_a_cnn_drops_what_it_says_behind_every_layer() -> None:
    """In a pass, and where the parts of a layer are asked for; what remains is larger by as much. The slope is 1, so
    that nothing else makes zeros."""
    encoder, batch = CNN((16, 16, 1), filters=32, layers=2, slope=1.0, dropout=0.2), images(50, 16)
    for layers in (1, 2):
        lower = encoder.lower(batch, layers)
        assert (lower == 0).float().mean() == pytest.approx(0.2, abs=0.02)
    x = torch.rand(50, 32, 8, 8) + 1
    joined = encoder.join(x, x, 0)
    assert (joined == 0).float().mean() == pytest.approx(0.2, abs=0.02)
    torch.testing.assert_close(joined[joined != 0], (F.max_pool2d(x, 2) / 0.8)[joined != 0])
    encoder.eval()
    assert not (encoder(batch) == 0).any()
    assert torch.equal(encoder.join(x, x, 0), F.max_pool2d(x, 2))


# ---- LSTM

SENTENCES = [[5, 6, BLANK, 7, 8], [9, BLANK], [BLANK, 4, 5, 4, BLANK, 6, 7], [3], [8, 9, 10, 11]]


def padded(length: int) -> Tensor:
    return torch.tensor([s + [PAD] * (length - len(s)) for s in SENTENCES], dtype=torch.int32)


def one_at_a_time(encoder: LSTM, at_blank: bool) -> Tensor:
    """Each sentence by itself, without padding, forwards and (reversed) backwards."""
    keys = []
    for sentence in SENTENCES:
        words = encoder.embedding(torch.tensor([sentence]))
        place = sentence.index(BLANK) if at_blank and BLANK in sentence else len(sentence) - 1
        key = [encoder.ahead(words)[0][0, place]]
        if encoder.back is not None:
            from_the_end = len(sentence) - 1 - place if at_blank else len(sentence) - 1
            key.append(encoder.back(words.flip(1))[0][0, from_the_end])
        keys.append(torch.cat(key))
    return torch.stack(keys)


@pytest.mark.parametrize("readout", ["end", "blank"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", [7, 12])
def test_padding_is_never_read(readout: str, bidirectional: bool, length: int) -> None:
    encoder = LSTM(12, embedding=6, units=5, readout=readout, bidirectional=bidirectional)
    keys, expected = encoder(padded(length)), one_at_a_time(encoder, readout == "blank")
    assert keys.shape == (len(SENTENCES), encoder.width) == (len(SENTENCES), 10 if bidirectional else 5)
    torch.testing.assert_close(keys, expected)
    weights = torch.randn_like(keys)
    parameters = list(encoder.parameters())
    ours = torch.autograd.grad((keys * weights).sum(), parameters)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_two_directions_of_one_layer_are_the_usual_bidirectional_lstm() -> None:
    encoder = LSTM(12, embedding=6, units=5, layers=1, readout="blank", bidirectional=True)
    usual = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
    ahead = encoder.ahead.state_dict()
    back = {f"{name}_reverse": tensor for name, tensor in encoder.back.state_dict().items()}
    usual.load_state_dict({**ahead, **back})
    keys = encoder(padded(9))
    for sentence, key in zip(SENTENCES[:3], keys, strict=False):
        states = usual(encoder.embedding(torch.tensor([sentence])))[0][0]
        torch.testing.assert_close(key, states[sentence.index(BLANK)])


def test_one_direction_at_the_blank_sees_the_left_context_only() -> None:
    encoder = LSTM(12, embedding=6, units=5, readout="blank")
    one, other = torch.tensor([[4, 5, BLANK, 6]]), torch.tensor([[4, 5, BLANK, 7]])
    assert torch.equal(encoder(one), encoder(other))
    assert not torch.equal(encoder(one), encoder(torch.tensor([[4, 6, BLANK, 6]])))


def test_an_empty_sentence_has_a_key() -> None:
    assert LSTM(12, embedding=6, units=5, bidirectional=True)(torch.zeros(2, 4, dtype=torch.int32)).isfinite().all()


@pytest.mark.parametrize("layers", [1, 3])
def test_layer_by_layer_the_lstm_is_the_stack(layers: int) -> None:
    """The same numbers, the same drops (on a CPU, where both are drawn alike) and the same gradients."""
    stack = nn.LSTM(6, 5, layers, batch_first=True, dropout=0.4 if layers > 1 else 0.0)
    words = torch.randn(4, 7, 6)
    found = []
    for how in (lambda: stack(words)[0], lambda: read_by_layers(stack, words)):
        torch.manual_seed(1)
        states = how()
        found.append([states, *torch.autograd.grad(states.square().sum(), list(stack.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_the_lstm_starts_with_open_forget_gates_and_drops_only_in_training() -> None:
    encoder = LSTM(12, embedding=6, units=5, dropout=0.5)
    bias = (encoder.ahead.bias_ih_l0 + encoder.ahead.bias_hh_l0).view(4, 5)
    assert torch.equal(bias, torch.tensor([0.0, 1.0, 0.0, 0.0]).view(4, 1).expand(4, 5))
    tokens = padded(7)
    assert not torch.equal(encoder(tokens), encoder(tokens))
    encoder.eval()
    assert torch.equal(encoder(tokens), encoder(tokens))


# ---- all of them

NARROW = {
    "cnn": lambda: CNN((12, 12, 1), filters=4, layers=2, dropout=0.2),
    "resnet": lambda: ResNet((12, 12, 1), blocks=(3, 4), features=5, dropout=0.2),
    "lstm": lambda: LSTM(256, embedding=6, units=5, dropout=0.2, bidirectional=True),
}


@pytest.mark.parametrize("name", NARROW)
def test_in_eval_mode_a_key_does_not_depend_on_its_neighbours(name: str) -> None:
    encoder = NARROW[name]()
    batch = torch.randint(1, 200, (6, 9), dtype=torch.int32) if name == "lstm" else images(6, 12)
    encoder(batch)
    encoder.eval()
    torch.testing.assert_close(encoder(batch[2:3]), encoder(batch)[2:3])


def test_a_uniform_start_is_what_pytorch_did_until_2018() -> None:
    """Filters of n inputs have the variance 1 / (3 n), gains the mean 1/2; by He's rule 2 / n and 1."""
    usual, uniform = (CNN((28, 28, 3), filters=32, layers=2, slope=0.0, uniform_start=one) for one in (False, True))
    for encoder, variance, gain in ((usual, 2.0, 1.0), (uniform, 1 / 3, 0.5)):
        for convolution, norm in zip(encoder.convolutions, encoder.norms, strict=True):
            inputs = convolution.in_channels * 9
            assert (convolution.weight.var() * inputs).item() == pytest.approx(variance, rel=0.2)
            assert norm.weight.mean().item() == pytest.approx(gain, abs=0.2)
    assert 0 < uniform.norms[0].weight.min() < uniform.norms[0].weight.max() < 1


def test_batch_norm_folded_into_the_filters_changes_no_value():
    """In eval mode without gradients the CNN folds batch norm; with gradients it computes it step by step."""
    torch.manual_seed(0)
    network = CNN((28, 28, 1), filters=16, batch_norm=4)
    images = torch.randint(0, 256, (6, 28, 28, 1), dtype=torch.uint8)
    with torch.no_grad():
        for norm in network.norms:
            norm.weight.uniform_(-1.5, 1.5)  # a negative gain turns maxima into minima
            norm.bias.normal_()
        for _ in range(3):
            network(images)  # moves the running statistics
    network.eval()
    with torch.no_grad():
        folded = network(images)
    plain = network(images)
    assert plain.requires_grad
    assert not torch.equal(folded, plain)  # it did take another way
    torch.testing.assert_close(folded, plain.detach(), rtol=1e-4, atol=1e-5)
