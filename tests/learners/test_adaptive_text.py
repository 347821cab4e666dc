"""adaLSTM and LSTM + adaFFN against sentence-by-sentence computations, and what their memory allows."""

import math
from collections.abc import Iterator

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners import Learner, build_learner
from fastweights.learners.adaptive_text import AdaLSTM, KeyNetwork, cell_errors, last_steps, unroll
from fastweights.learners.registry import PRESETS, LearnerSettings, find_preset, preset
from fastweights.learners.saved import load_state, save_state
from fastweights.nn.encoders.lstm import LSTM
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError
from fastweights.utils.tokens import BLANK, PAD

NAMES = ("adalstm-gradient", "adalstm-df", "lstm-adaffn-df")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this narrow are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def built(name: str, slots: int = 3, **changes) -> Learner:
    """A narrow model in double precision."""
    small = {"embedding": 5, "units": 4, "map_units": 6, **({"width": 7} if "ffn" in name else {})}
    shape = {"dataset": "words", "item_shape": (8,), "vocabulary": tiny.VOCABULARY}
    return build_learner(preset(name, **shape, way=slots, shot=1, **{**small, **changes})).double()


def episode(tasks: int = 2, way: int = 3, shot: int = 2, queries: int = 1) -> Episode:
    return tiny.word_episode(tasks, way, shot, queries)


# ---- one sentence at a time


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def read(stack: nn.LSTM, words: list[Tensor], shifts: list[Tensor] | None = None):
    """A sentence through an LSTM: the top state after the last word, and every layer's cell and output gate there."""
    size, layers = stack.hidden_size, stack.num_layers
    states = [torch.zeros(size, dtype=torch.float64) for _ in range(layers)]
    cells = [torch.zeros(size, dtype=torch.float64) for _ in range(layers)]
    gates = [torch.zeros(size, dtype=torch.float64) for _ in range(layers)]
    for word in words:
        x = word
        for n in range(layers):
            w_x, w_h = getattr(stack, f"weight_ih_l{n}"), getattr(stack, f"weight_hh_l{n}")
            biases = getattr(stack, f"bias_ih_l{n}") + getattr(stack, f"bias_hh_l{n}")
            a = w_x @ x + w_h @ states[n] + biases
            entry, keep, new, gates[n] = (
                sigmoid(a[:size]),
                sigmoid(a[size : 2 * size]),
                torch.tanh(a[2 * size : 3 * size]),
                sigmoid(a[3 * size :]),
            )
            cells[n] = keep * cells[n] + entry * new
            b = torch.zeros(size, dtype=torch.float64) if shifts is None else shifts[n]
            states[n] = gates[n] * (torch.tanh(cells[n]) + torch.tanh(b))
            x = states[n]
    return states[-1], cells, gates


def words_of(embedding: nn.Embedding, sentence: Tensor) -> list[Tensor]:
    return [embedding.weight[int(token)] for token in sentence if int(token) != PAD]


def map_gradient(mlp: nn.Module, gradient: Tensor) -> Tensor:
    """Each number by its logarithm over 7 and its sign, or where it is tiny by -1 and e^7 times itself."""
    shifts = []
    for number in gradient:
        large = abs(float(number.detach())) >= math.exp(-7)
        pair = (torch.log(number.abs()) / 7, number.sign()) if large else (number * 0 - 1, number * math.exp(7))
        shifts.append(mlp(torch.stack(pair))[0])
    return torch.stack(shifts)


def map_feedback(mlp: nn.Module, derivative: Tensor, error: Tensor) -> Tensor:
    return torch.stack([mlp(number * error)[0] for number in derivative])


def remembered(learner: AdaLSTM, sentence: Tensor, slot: int) -> list[Tensor]:
    """The shifts that a sentence leaves: one for each layer, the last for the logits."""
    top, cells, gates = read(learner.reader, words_of(learner.encoder.embedding, sentence))
    logits = learner.output(top)
    loss = -torch.log(torch.exp(logits[slot]) / torch.exp(logits).sum())
    further = not learner.first_order
    *at_cells, error = torch.autograd.grad(loss, [*cells, logits], create_graph=further)
    if learner.by_feedback:
        derivatives = [gate / torch.cosh(cell) ** 2 for gate, cell in zip(gates, cells, strict=True)]
        derivatives = derivatives if further else [one.detach() for one in derivatives]
        shifts = [map_feedback(learner.hidden_map.mlp, one, error) for one in derivatives]
    else:
        shifts = [map_gradient(learner.hidden_map.mlp, one) for one in at_cells]
    return [*shifts, map_gradient(learner.output_map.mlp, error)]


def slow_answer(learner: AdaLSTM, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
    """The logits of one query of one task; label c is bound to slot c."""
    embedding, keys = learner.encoder.embedding, learner.encoder.ahead
    memory = [
        (read(keys, words_of(embedding, sentence))[0], remembered(learner, sentence, int(label)))
        for sentence, label in zip(support, labels, strict=True)
    ]
    asked = read(keys, words_of(embedding, query))[0]
    weights = torch.stack([torch.exp((asked * key).sum()) for key, _ in memory])
    weights = weights / weights.sum()
    shifts = [sum(w * s[n] for w, (_, s) in zip(weights, memory, strict=True)) for n in range(len(memory[0][1]))]
    top, _, _ = read(learner.reader, words_of(embedding, query), shifts[:-1])
    return learner.output(top) + shifts[-1]


@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("name", ["adalstm-gradient", "adalstm-df"])
def test_adalstm_agrees_with_a_sentence_by_sentence_computation(name, first_order):
    """Values, and the gradients of all parameters."""
    learner, tasks = built(name, first_order=first_order), episode()
    logits = learner(tasks)
    slow = torch.stack(
        [
            torch.stack([slow_answer(learner, tasks.support_x[t], tasks.support_y[t], q) for q in tasks.query_x[t]])
            for t in range(tasks.tasks)
        ]
    )
    torch.testing.assert_close(logits, slow)
    direction, parameters = torch.randn_like(logits), dict(learner.named_parameters())
    fast, obvious = (torch.autograd.grad((one * direction).sum(), list(parameters.values())) for one in (logits, slow))
    for parameter, ours, theirs in zip(parameters, fast, obvious, strict=True):
        assert ours.abs().max() > 0, parameter
        torch.testing.assert_close(ours, theirs, msg=lambda text, parameter=parameter: f"{parameter}: {text}")


def test_cell_errors_are_the_gradient_also_under_dropout():
    stack = nn.LSTM(3, 4, 3, batch_first=True, dropout=0.5).double()
    words, places = torch.randn(2, 6, 3, dtype=torch.float64), torch.tensor([5, 2])
    layers = unroll(stack, words)
    assert {0.0, 2.0} == set(layers[1].dropout.flatten().tolist())
    at_top = torch.randn(2, 4, dtype=torch.float64)
    errors = cell_errors(stack, last_steps(stack, layers, places), at_top)
    for row, place in enumerate(places.tolist()):
        masks = [layer.dropout[row] for layer in layers[1:]]
        states, cells = [torch.zeros(4, dtype=torch.float64)] * 3, [torch.zeros(4, dtype=torch.float64)] * 3
        for t in range(place + 1):
            x = words[row, t]
            for n in range(3):
                x = x if n == 0 else x * masks[n - 1][t]
                a = getattr(stack, f"weight_ih_l{n}") @ x + getattr(stack, f"weight_hh_l{n}") @ states[n]
                a = a + getattr(stack, f"bias_ih_l{n}") + getattr(stack, f"bias_hh_l{n}")
                cells[n] = sigmoid(a[4:8]) * cells[n] + sigmoid(a[:4]) * torch.tanh(a[8:12])
                x = states[n] = sigmoid(a[12:]) * torch.tanh(cells[n])
        exact = torch.autograd.grad((states[-1] * at_top[row]).sum(), cells)
        for ours, theirs in zip(errors, exact, strict=True):
            torch.testing.assert_close(ours[row], theirs)


def test_lstm_with_adaffn_agrees_with_a_sentence_by_sentence_computation():
    learner, tasks = built("lstm-adaffn-df"), episode(tasks=1)
    encoder, twin = learner.encoder, learner.key_encoder

    def layer(sentence):
        return learner.hidden(read(encoder.ahead, words_of(encoder.embedding, sentence))[0])

    def key(sentence):
        return learner.key_layer(read(twin.ahead, words_of(twin.embedding, sentence))[0])

    def act(x):
        return torch.where(x > 0, x, 0.2 * x)

    keys, shifts, at_logits = [], [], []
    for sentence, label in zip(tasks.support_x[0], tasks.support_y[0], strict=True):
        before = layer(sentence)
        error = (learner.output(act(before)).softmax(-1) - F.one_hot(label, 3)).detach()
        keys.append(key(sentence))
        shifts.append(map_feedback(learner.hidden_map.mlp, torch.where(before > 0, 1.0, 0.2).detach(), error))
        at_logits.append(map_gradient(learner.output_map.mlp, error))
    slow = []
    for query in tasks.query_x[0]:
        weights = torch.stack([key(query) @ one / math.sqrt(7) for one in keys]).softmax(0)
        shift, at_output = (sum(w * s for w, s in zip(weights, of, strict=True)) for of in (shifts, at_logits))
        slow.append(learner.output(act(layer(query)) + act(shift)) + at_output)
    torch.testing.assert_close(learner(tasks)[0], torch.stack(slow))


# ---- the networks


@pytest.mark.parametrize("readout", ["end", "blank"])
def test_the_key_network_computes_what_the_encoder_does(readout):
    """And has weights of the same names, so that a pre-trained encoder can be poured into it."""
    encoder = LSTM(tiny.VOCABULARY, embedding=5, units=4, readout=readout).double()
    keys, sentences = KeyNetwork(encoder), tiny.word_episode(1, 4, 3, 1).support_x[0]
    assert keys.state_dict().keys() == encoder.state_dict().keys()
    ours, theirs = keys(sentences), encoder(sentences)
    torch.testing.assert_close(ours, theirs)
    direction, parameters = torch.randn_like(ours), list(encoder.parameters())
    pairs = zip(*(torch.autograd.grad((x * direction).sum(), parameters) for x in (ours, theirs)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_without_a_blank_a_sentence_is_read_to_its_end():
    keys = KeyNetwork(LSTM(10, readout="blank", embedding=2, units=2))
    assert keys.places(torch.tensor([[3, BLANK, 4, BLANK, PAD], [3, 4, 5, PAD, PAD]])).tolist() == [1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name):
    learner, tasks = built(name).eval(), episode()
    longer = tasks.map_x(lambda x: F.pad(x, (0, 5), value=PAD))
    torch.testing.assert_close(learner(longer), learner(tasks))


def test_wrong_encoders_are_named():
    words = {"vocabulary": 9, "item_shape": (5,)}
    with pytest.raises(UserError, match=r"read sentences in one direction; set bidirectional to false\."):
        build_learner(LearnerSettings("adalstm", "lstm", **words, bidirectional=True))
    with pytest.raises(UserError, match=r"choose the encoder lstm\."):
        build_learner(LearnerSettings("adalstm", "cnn"))


# ---- the memory


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_depends_on_its_own_query_and_task_alone(name):
    learner, tasks = built(name).eval(), episode(tasks=3, queries=2)
    state = learner.describe(tasks.support_x, tasks.support_y)
    learner.check_state(state, tasks.query_x)
    together = learner.predict(state, tasks.query_x)
    one_by_one = torch.cat([learner.predict(state, tasks.query_x[:, n : n + 1]) for n in range(6)], 1)
    torch.testing.assert_close(one_by_one, together)
    torch.testing.assert_close(learner(tasks[1:2]), together[1:2])
    order = torch.randperm(6)
    shuffled = learner.describe(tasks.support_x[:, order], tasks.support_y[:, order])
    torch.testing.assert_close(learner.predict(shuffled, tasks.query_x), together)
    assert not learner.transductive


@pytest.mark.parametrize("name", NAMES)
def test_adding_examples_is_describing_all_of_them_and_forgetting_is_leaving_out(name, tmp_path):
    learner, tasks = built(name, slots=4).eval(), episode(tasks=2, way=4)
    x, y, later = tasks.support_x, tasks.support_y, tasks.support_y[0] == 3
    first = learner.describe(x[:, ~later], y[:, ~later], 3)
    assert learner.can_extend
    assert learner.can_forget
    extended = learner.extend(first, x[:, later], y[:, later])
    whole = learner.describe(x, y, 4)
    torch.testing.assert_close(learner.predict(extended, tasks.query_x), learner.predict(whole, tasks.query_x))
    without = learner.predict(learner.forget(whole, 3), tasks.query_x)
    torch.testing.assert_close(without[..., :3], learner.predict(first, tasks.query_x))
    save_state(tmp_path / "state", learner.forget(whole, 3), learner)
    loaded = load_state(tmp_path / "state", learner=learner)
    assert torch.equal(learner.predict(loaded, tasks.query_x), without)
    with pytest.raises(UserError, match="no label 4 to forget"):
        learner.forget(whole, 4)
    with pytest.raises(UserError, match="4 label slots"):
        learner.extend(whole, x, y + 1)


def test_constant_information_takes_the_description_out_of_the_reader_s_lessons():
    """With `first_order` the embedding of a word that only the description has is learned through its key alone."""
    tasks = episode(tasks=1)
    for first_order in (True, False):
        learner = built("adalstm-df", first_order=first_order)
        state = learner.describe(tasks.support_x, tasks.support_y)
        assert all(state[f"shifts.{layer}"].requires_grad for layer in (0, 1, "output"))
        found = torch.autograd.grad(state["shifts.0"].sum(), learner.reader.weight_ih_l0, allow_unused=True)[0]
        assert (found is None) == first_order


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_computed_where_nobody_wants_them(name):
    learner, tasks = built(name).eval(), episode()
    expected = learner(tasks).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(learner(tasks), expected)


# ---- presets


def test_the_hyper_parameters():
    benchmark = {"dataset": "ptb", "item_shape": (50,), "vocabulary": 10_000}
    assert {name for name in PRESETS if name.startswith(("adalstm", "lstm-adaffn"))} == set(NAMES)
    for name in NAMES:
        for shot, units in ((1, 200), (2, 300), (3, 300)):
            s = preset(name, **benchmark, way=5, shot=shot)
            assert (s.layers, s.embedding, s.units, s.map_units, s.dropout) == (2, 300, units, 40, 0.0)
            similarity = "scaled" if "ffn" in name else "dot"
            assert (s.information, s.similarity, s.first_order) == (name.rsplit("-", 1)[1], similarity, True)
            assert "ffn" not in name or s.width == units
        assert find_preset(name).training == {"learning_rate": 1e-3, "tasks_per_step": 16, "steps": 20_000}


@pytest.mark.parametrize("shot", [1, 2, 3])
def test_no_sentence_has_most_of_lstm_with_adaffn_s_attention_at_the_start(shot):
    """At the sizes of the benchmark; where one has, keys that know nothing yet decide, and training stays at chance."""
    s = preset("lstm-adaffn-df", dataset="ptb", item_shape=(20,), vocabulary=500, way=5, shot=shot)
    learner, sentences = build_learner(s), torch.randint(3, 500, (4, 5 * shot + 5, 20), dtype=torch.int32)
    with torch.no_grad():
        described, queries = learner.keys_of(sentences).split([5 * shot, 5], dim=1)
        attention = learner._attend(queries, described)
    entropy = -torch.special.xlogy(attention, attention).sum(-1).mean()
    assert entropy > 0.95 * math.log(5 * shot)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_missing_words(name):
    """5-way 1-shot, new words in every task: at least 60 % (chance: 20 %) on tasks never seen, within 250 steps."""
    learner = built(name, 5, embedding=16, units=24, map_units=20, **({"width": 24} if "ffn" in name else {})).float()
    assert tiny.words_accuracy(learner, 0.6) >= 0.6
