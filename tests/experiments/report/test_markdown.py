"""Markdown tables, and the page of HTML."""

from fastweights.experiments.report.markdown import paragraphs, settings_text, table, to_html


def test_tables_keep_line_breaks_and_bars():
    assert table(("a",), [("1\n2 | 3",)]) == "| a |\n| --- |\n| 1<br>2 \\| 3 |"


def test_paragraphs_leave_out_what_is_empty():
    assert paragraphs("# A", "", "b") == "# A\n\nb\n"


def test_settings_are_written_for_people():
    text = settings_text(
        {"steps": 32_000, "augment": ("flip", "crop"), "class_augment": (), "bias": True, "rate": 1e-3}
    )
    assert text == "steps 32,000, augment flip+crop, class_augment none, bias yes, rate 0.001"


def test_html_has_contents_tables_and_embedded_pictures():
    text = "# A & b\n\n**x** `y-*`, *z*\n\n" + table(("a",), [("1\n2",)]) + "\n\n## Deep\n\n![bars](bars.svg)"
    html = to_html(text, "<t>", {"bars.svg": "<svg/>"})
    assert "<title>&lt;t&gt;</title>" in html
    assert '<h1 id="a-b">A &amp; b</h1>' in html
    assert "<strong>x</strong> <code>y-*</code>, <em>z</em>" in html
    assert "<td>1<br>2</td>" in html
    assert '<li><a href="#deep">Deep</a></li>' in html
    assert html.index('class="toc"') < html.index("<h1")
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+"' in html
    assert "bars.svg" not in html
