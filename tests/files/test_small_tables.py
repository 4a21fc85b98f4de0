"""Small tables as text and as HTML."""

from __future__ import annotations

from zeroforget.files.text import SmallTable


def test_columns_line_up_and_hidden_signs_are_shown() -> None:
    table = SmallTable("birds", ("task", "classes"), [("a\x1b[2J", "3"), ("garden", "12")])
    assert str(table).splitlines() == ["birds", "task        classes", "a\\u001b[2J        3", "garden           12"]


def test_names_cannot_add_markup_to_a_page() -> None:
    page = SmallTable("<b>", ("task",), [("<script>alert(1)</script>",)]).to_html()
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page


def test_a_table_without_rows_is_its_title() -> None:
    assert str(SmallTable("no task yet", ("task",), [])) == "no task yet"
