"""The long pages: every column is what its heading says."""

from dataclasses import replace

from fastweights.experiments import ledger
from fastweights.experiments.report.pages import dataset_page, recipes_page
from fastweights.experiments.report.results import read_results

from ..conftest import made_up, write_ledger

COMMAND = "`fastweights reproduce mini-imagenet-5way-1shot/fwcnn-hebb --recipe best --seeds 2`"


def page(folder, *records, name="mini-imagenet"):
    return dataset_page(read_results(write_ledger(folder, *records)), name)


def test_an_empty_ledger_still_gives_pages(tmp_path):
    (tmp_path / "runs.jsonl").touch()
    results = read_results(tmp_path / "runs.jsonl")
    text = dataset_page(results, "mini-imagenet")
    assert "| fwCNN (Hebb) | 50.21 ± 0.37 | 64.75 ± 0.49 |" in text
    assert "; fwCNN (gradient); fwCNN (Hebb); TCML; " in text
    assert "| Hebbian Softmax, ours |" not in text
    assert "| LSTM-LM oracle | 72.8 | – | 72.8 | – | 72.8 | – |" in dataset_page(results, "ptb")
    assert "0 lines of 0 trainings" in recipes_page(results)


def test_every_column_is_what_its_heading_says(tmp_path):
    """By hand: 1.96 sd / 2 of (0.6, 0.8, 1.0, 0.4) is 25.30 %, of (1, 1, 0.8, 1) 9.80 %; differences by task."""
    text = page(
        tmp_path,
        made_up(centroid=(1, 2, 3, 4)),
        made_up(right=(5, 5, 4, 5), centroid=(5, 5, 5, 5), seed=1),
        made_up(right=(2, 4, 4, 2), variant="truncated"),
        made_up(right=(1, 4, 4, 2), variant="truncated", recipe="paper"),
        made_up(recipe="paper", right=(2, 3, 3, 2)),
        made_up(right=(3, 4, 5, 5), variant="no-augmentation"),
        made_up(right=(5, 5, 5, 5), learner="fwcnn-normalised"),
    )
    ours = "82.50 ± 17.55 (2 seeds, sd 17.68)"
    assert f"50.21 ± 0.37<br>**{ours}**" in text
    assert f"| fwCNN (Hebb) | 5-way 1-shot | best | 50.21 ± 0.37 | {ours}<br>{COMMAND} | reached | 75.00 |" in text
    assert "| fwCNN (Hebb) | 5-way 1-shot | paper | 50.21 ± 0.37 | 50.00 ± 11.32 (1 seed)<br>" in text
    assert "--recipe paper --seeds 1` | missed by 0.21 | 60.00 |" in text
    truncated = COMMAND.replace("fwcnn-hebb", "fwcnn-hebb/truncated").replace("seeds 2", "seeds 1")
    assert f"| best | 60.00 ± 22.63 (1 seed)<br>{truncated} | -10.00 ± 11.32 (1 seed) |" in text
    assert f"{truncated.replace('best', 'paper')} | +5.00 ± " in text
    assert "| baseline: fast and slow weights in the fully connected layer | paper | 50.00 ± 11.32 (1 seed)" in text
    [left_out] = [row for row in text.splitlines() if row.startswith("| `no-augmentation` |")]
    assert left_out.endswith("| +15.00 ± 29.40 (1 seed) |")
    best = "100.00 ± 0.00 (1 seed) | `fwcnn-normalised` | reached |"
    assert f"| fwcnn | mini-imagenet 5-way 1-shot | 54 | {best}" in text
    assert "| `paper-learning-rate` | mini-imagenet 5-way 1-shot | not yet run | – |" in text


def test_both_splits_of_the_text_are_shown(tmp_path):
    about = {"experiment": "ptb-5way-1shot-all", "learner": "lstm-fwmlp-hebb"}
    text = page(
        tmp_path,
        made_up(**about, protocol="standard"),
        made_up(**about, protocol="pooled", right=(1, 1, 1, 2)),
        name="ptb",
    )
    command = "`fastweights reproduce ptb-5way-1shot-all/lstm-fwmlp-hebb --recipe best --protocol pooled --seeds 1`"
    pooled = (
        f"| 5-way 1-shot, all, pooled | best | 44.5 | 25.00 ± 9.80 (1 seed)<br>{command} | missed by 19.50 | 60.00 |"
    )
    assert pooled in text
    assert "| LSTM + fwMLP (Hebb) | 5-way 1-shot, all | best | 44.5 | 70.00 ± 25.30 (1 seed)<br>" in text


def test_a_page_has_the_notes_of_its_dataset(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mini-imagenet.md").write_text("Because of `this`.\n")
    path = write_ledger(tmp_path, made_up())
    assert "## Notes\n\nBecause of `this`." in dataset_page(read_results(path), "mini-imagenet")
    assert "Because" not in dataset_page(read_results(path), "omniglot")


def test_the_plan_is_counted(tmp_path):
    path = write_ledger(tmp_path, made_up(seed=0), made_up(seed=2), made_up(variant="truncated"))
    text = recipes_page(read_results(path))
    assert "| every fast-weight cell by Hebb and second-order gradient | 1 of 22 |" in text
    assert "| three seeds of the Hebb cells | 2 of 33 |" in text
    assert "| the ablation figure | 2 of 6 |" in text
    assert "| the other systems with one shot by the best recipe | 0 of 33 |" in text
    assert "| first-order gradient | 0 of 11 |" in text


def test_hours_are_hours_and_old_recipes_are_named(tmp_path):
    (line, details), (other, more) = made_up(), made_up(seed=1)
    lines = [replace(line, train_seconds=5400.0), replace(other, train_seconds=1800.0)]
    ledger.append(tmp_path / "runs.jsonl", lines, [details, more])
    text = recipes_page(read_results(tmp_path / "runs.jsonl"))
    assert "2 lines of 2 trainings, 2.0 hours" in text
    assert f"Run before the recipe was changed: {line.name}; {other.name}." in text
    assert "| a device | 2.0 | abc |  | data | 2 |" in text


def test_a_system_by_its_own_recipe_stands_beside_the_best_and_the_published(tmp_path):
    text = page(
        tmp_path,
        made_up(learner="maml-cnn"),
        made_up(learner="maml-cnn", recipe="own", right=(2, 3, 3, 2)),
        made_up(learner="metanet-cnn", recipe="own", right=(2, 3, 3, 2)),
    )
    assert "| MAML | 48.7 ± 1.84<br>**70.00 ± 25.30 (1 seed)**<br>*50.00 ± 11.32 (1 seed)* |" in text
    assert "| MetaNet | 49.21 ± 0.96<br>*50.00 ± 11.32 (1 seed)* |" in text
    command = "`fastweights reproduce mini-imagenet-5way-1shot/maml-cnn --recipe own --seeds 1`"
    row = f"| MAML | 5-way 1-shot | own | 48.7 ± 1.84 | 50.00 ± 11.32 (1 seed)<br>{command} | reached | 60.00 |"
    assert row in text


def test_a_system_that_the_paper_lacks_is_held_against_its_authors_number(tmp_path):
    text = page(tmp_path, made_up(learner="prototypical-cnn", right=(2, 2, 2, 2)), made_up(learner="ridge-cnn"))
    [row] = [row for row in text.splitlines() if row.startswith("| Prototypical Networks, ours | 5-way 1-shot | best")]
    assert "| 49.42 ± 0.78 (its authors) | 40.00 ± " in row
    assert row.endswith("| missed by 9.42 | 60.00 |")
    [row] = [row for row in text.splitlines() if row.startswith("| Ridge-regression head, ours | 5-way 1-shot | best")]
    assert "| best | – | 70.00 ± " in row
    assert row.endswith("|  | 60.00 |")
