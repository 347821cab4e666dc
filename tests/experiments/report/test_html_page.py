"""report.html: pictures first, and nothing from outside."""

from dataclasses import replace
from html.parser import HTMLParser

from fastweights.experiments import ledger
from fastweights.experiments.report import figures
from fastweights.experiments.report import write as report
from fastweights.experiments.report.results import read_results
from fastweights.experiments.report.write import curves_figure

from ..conftest import made_up, write_ledger


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.pictures, self.headings = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.pictures.append(dict(attributes)["src"])
        elif tag not in ("br", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == "img" or self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def parsed(path):
    page = Balanced()
    page.feed(path.read_text())
    assert page.open == []
    return page


def test_it_leads_with_pictures_and_is_well_formed(tmp_path):
    (tmp_path / "task-pca.svg").write_text("<svg/>")
    path = write_ledger(tmp_path, made_up(), made_up(learner="fwcnn-gradient"), made_up(variant="truncated"))
    report.write(path)
    page = parsed(tmp_path / "report.html")
    assert page.headings[:4] == [
        "Pictures",
        "Ablation: where the fast weights are",
        "Learning curves",
        "One task in the memory",
    ]
    assert page.headings[4] == "Results"
    assert "Recipes and runs" in page.headings
    assert len(page.pictures) == 4  # the ablation is on the summary, too
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.pictures)
    text = (tmp_path / "report.html").read_text()
    assert "http" not in text.split("</style>")[1]
    report.write(path)
    assert (tmp_path / "report.html").read_text() == text


def test_an_empty_ledger_gives_a_page(tmp_path):
    (tmp_path / "runs.jsonl").touch()
    report.write(tmp_path / "runs.jsonl")
    assert "One task in the memory" not in parsed(tmp_path / "report.html").headings


def test_each_recipe_has_a_panel_in_the_order_of_the_pages(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "learning_curves", lambda panels: drawn.update(panels) or "<svg/>")
    results = read_results(write_ledger(tmp_path, *(made_up(recipe=recipe) for recipe in ("own", "best", "paper"))))
    curves_figure(results, "mini-imagenet")
    assert [title.rpartition(" ")[2] for title in drawn] == ["paper", "best", "own"]


def test_curves_on_training_classes_are_named_so(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "learning_curves", lambda panels: drawn.update(panels) or "<svg/>")
    (line, details), (other, more) = made_up(), made_up(learner="fwcnn-gradient")
    line = replace(line, config={"learner": {}, "training": {"train_on_validation": True, "tasks_per_step": 7}})
    ledger.append(tmp_path / "runs.jsonl", [line, other], [details, more])
    results = read_results(tmp_path / "runs.jsonl")
    assert curves_figure(results, "mini-imagenet") == "<svg/>"
    [(title, curves)] = drawn.items()
    assert title.endswith("cnn, by best")
    assert [(name, tasks) for name, tasks, _ in curves] == [("fwcnn-gradient", 1), ("fwcnn-hebb †", 7)]
    assert curves_figure(results, "omniglot") == ""
