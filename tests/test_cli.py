"""The command line: text and JSON out, errors of one line with a remedy, exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tiny_models import save_tiny, tiny_model

from specdec.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tiny_model("llama", 0), tmp_path_factory.mktemp("model") / "m"))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def common(model: str) -> list[str]:
    return ["--target", model, "--num-blocks", "64", "--max-tokens", "12", "--ignore-eos"]


def test_generate_prints_text_and_figures(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "hello", *common(model))
    assert code == 0 and out.strip()
    assert "acceptance rate" in err and "mean accepted length" in err


def test_streamed_text_equals_the_whole_text(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, streamed, _ = run(capsys, "generate", "hello", *common(model))
    _, whole, _ = run(capsys, "generate", "hello", "--no-stream", *common(model))
    assert streamed == whole


def test_marks_name_each_origin(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    drafting = ("--draft", model, "--num-draft-tokens", "5")
    code, out, err = run(capsys, "generate", "hello", "--mark", *drafting, *common(model))
    assert code == 0
    assert out.count("+") >= 8 and "accepted" in err and "bonus" in err


def test_json_is_one_object_a_prompt(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n', encoding="utf-8")
    code, out, _ = run(capsys, "generate", "--file", str(file), "--json", *common(model))
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["prompt"] for row in rows] == ["one", "two"]
    assert all(len(row["outputs"][0]["token_ids"]) == 12 for row in rows)
    assert rows[0]["engine"]["proposer"] == "ngram"


def test_a_prompt_from_standard_input(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    code, out, _ = run(capsys, "generate", "-", *common(model))
    assert code == 0 and out.strip()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "x", "--target", "/no/such/folder"], "no model '/no/such/folder'"),
        (["generate", "x", "--target", "smollm2-135n"], "did you mean 'smollm2-135m'"),
        (["generate", "x", "--temperature", "-1"], "temperature must be at least 0"),
        (["generate", "x", "--top-p", "0"], "top_p must be above 0"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "--file", "/no/such/file"], "/no/such/file"),
        (["generate", "x", "-k", "99"], "num_draft_tokens must be between 0 and 64"),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 1 and out == ""
    assert err.startswith("specdec: error: ") and err.count("\n") == 1
    assert message in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="temperature"):
        main(["generate", "x", "--temperature", "-1", "--debug"])


def test_ctrl_c_ends_cleanly(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.engine.Engine.step", interrupt)
    code, _, err = run(capsys, "generate", "hello", *common(model))
    assert code == 130 and "interrupted" in err


def test_chat_keeps_the_conversation(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hi", "", "/reset", "again", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, out, err = run(capsys, "chat", *common(model))
    assert code == 0 and len(out.splitlines()) >= 2
    assert "emitted" in err


def test_info_names_backends_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["attention_backends"]["reference"] == "available"
    assert {"draft_model", "ngram", "none"} <= set(found["proposers"])
    assert found["auto"]["attention"] in found["attention_backends"]
    assert run(capsys, "info")[0] == 0
