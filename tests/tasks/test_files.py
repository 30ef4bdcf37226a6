from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Task
from tfgrpo.tasks import read_tasks


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.jsonl", '{"prompt": "a", "reference": "1"}\n{"prompt": "b", "reference": "2"}\n'),
        ("t.json", '[{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]'),
        ("t.jsonl", '{"input": "a", "output": "1"}\n{"input": "b", "output": "2"}'),
        ("t.csv", "prompt,expected\na,1\nb,2\n"),
        ("t.CSV", "\ufeffprompt;reference\r\na;1\r\nb;2\r\n"),
        ("t.csv", "input\toutput\na\t1\nb\t2\n"),
    ],
)
def test_common_forms_of_task_files_are_read_alike(tmp_path: Path, name: str, text: str) -> None:
    tasks = read_tasks(written(tmp_path, name, text))
    assert [(t.prompt, t.reference) for t in tasks] == [("a", "1"), ("b", "2")]
    assert len({t.task_id for t in tasks}) == 2


def test_further_columns_are_metadata(tmp_path: Path) -> None:
    text = 'id,prompt,answer,kind\nx,"two\nlines, ""quoted""",4,sum\n'
    (task,) = read_tasks(written(tmp_path, "t.csv", text))
    assert task == Task("x", 'two\nlines, "quoted"', "4", {"kind": "sum"})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("t.csv", "prompt,answer\na,1,2\n", "line 2: the row has not as many cells"),
        ("t.csv", "prompt,answer\na\n", "line 2: the row has not as many cells"),
        ("t.csv", "text,label\na,1\n", "prompt, messages, question, input"),
        ("t.csv", "id;text;kind\na;b;c\n", "no prompt; keys are id, text, kind:"),
        ("t.jsonl", "prompt,answer\na,1\n", "ends in .csv"),
        ("t.jsonl", '{"text": "a", "label": "b"}', "no prompt; keys are text, label"),
        ("t.json", '[{"prompt": "a"}, 3]', "line 2 is not a JSON object"),
        ("t.json", '[{"prompt": "a"},', "is not JSON"),
        ("t.csv", "prompt,answer\n", "holds no tasks"),
    ],
)
def test_a_file_of_another_form_says_what_is_wanted(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        read_tasks(written(tmp_path, name, text))


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1),
            st.text(st.characters(codec="utf-8", exclude_characters="\r\0")),
        ),
        min_size=1,
    )
)
def test_any_text_survives_csv(rows: list[tuple[str, str]]) -> None:
    import tempfile

    sheet = io.StringIO()
    out = csv.writer(sheet)
    out.writerow(["prompt", "reference"])
    out.writerows(rows)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "t.csv"
        path.write_text(sheet.getvalue(), encoding="utf-8", newline="")
        assert [(t.prompt, t.reference) for t in read_tasks(path)] == rows


def test_a_json_list_is_what_json_lines_say(tmp_path: Path) -> None:
    rows = [{"task_id": f"t{i}", "prompt": "x" * (i + 1), "reference": i} for i in range(3)]
    lines = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_tasks(lines) == read_tasks(written(tmp_path, "b.json", json.dumps(rows)))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("name", "text"),
    [("t.csv", "prompt,answer\r\nå,1\r\n"), ("t.jsonl", '{"prompt": "å", "answer": "1"}\r\n')],
)
def test_files_with_a_byte_order_mark_are_read(
    tmp_path: Path, name: str, text: str, encoding: str
) -> None:
    (tmp_path / name).write_bytes(text.encode(encoding))
    (task,) = read_tasks(tmp_path / name)
    assert (task.prompt, task.reference) == ("å", "1")


def test_another_encoding_is_told_with_line_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match="line 2: byte 0xe9 is not utf-8: save the file as UTF-8"):
        read_tasks(tmp_path / "t.jsonl")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "none.jsonl"])
def test_a_name_of_no_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="task file"):
        read_tasks(tmp_path / name)
