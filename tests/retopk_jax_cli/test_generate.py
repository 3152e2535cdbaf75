import json
import subprocess
import sys

import jax
import pytest

from models import load_model
from retopk_jax import ExactTopK, Full, ReTopK, generate
from retopk_jax.cli import main

PROMPT = "It is a truth universally acknowledged"
KEYS = {
    "text",
    "tokens",
    "prompt_tokens",
    "prefill_seconds",
    "decode_seconds",
    "tokens_per_second",
    "path_shares",
    "mean_candidates",
    "group_share",
    "predicted_error",
    "bytes",
}


def run(tiny, *args):
    return main(["generate", "--model", str(tiny), *map(str, args)])


def test_streams_the_text_and_writes_json(tiny, tmp_path, capfd):
    out = tmp_path / "out.json"
    assert run(tiny, "--prompt", PROMPT, "--max-new-tokens", 12, "--ignore-eos", "--json", out) == 0
    result = json.loads(out.read_text())
    assert result.keys() >= KEYS
    assert result["prompt_tokens"] == len(PROMPT)
    assert len(result["tokens"]) == 12
    assert sum(result["path_shares"].values()) == pytest.approx(1)
    assert result["path_shares"].keys() == {"reuse", "fallback", "refresh"}
    assert result["bytes"].keys() == {"weights", "kv_cache", "recall_cache"}
    printed, progress = capfd.readouterr()
    assert printed == result["text"] + "\n"
    assert f"read {len(PROMPT)} of {len(PROMPT)} prompt tokens" in progress
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (["--attention", "full"], Full()),
        (["--attention", "exact", "--budget", "5"], ExactTopK(5)),
        (
            [
                "--budget",
                "6",
                "--capacity",
                "8",
                "--recall",
                "2",
                "--window",
                "3",
                "--tau",
                "0.4",
                "--refresh",
                "4",
            ],
            ReTopK(6, 8, 2, 3, 0.4, 4),
        ),
    ],
)
def test_same_tokens_as_the_library(tiny, tmp_path, options, method):
    out = tmp_path / "out.json"
    assert run(tiny, "--prompt", PROMPT, "--max-new-tokens", 10, *options, "--json", out) == 0
    (completion,) = generate(
        load_model(tiny), PROMPT, attention=method, max_new_tokens=10
    ).completions
    result = json.loads(out.read_text())
    assert result["tokens"] == completion.tokens
    assert result["text"] == completion.text
    if completion.paths is None:
        assert result["path_shares"] is None
        assert result["mean_candidates"] is None
    else:
        assert result["path_shares"] == completion.paths.shares
        assert result["path_shares"]["refresh"] > 0


def test_batch_lists_what_belongs_to_a_prompt(tiny, tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text("Second prompt, from a file\n", encoding="utf-8")
    out = tmp_path / "out.json"
    options = ["--max-new-tokens", 5, "--budget", 8, "--json", out]
    assert run(tiny, "--prompt", PROMPT, "--prompt-file", file, *options) == 0
    both = json.loads(out.read_text())
    assert both["prompt_tokens"] == [len(PROMPT), 27]
    assert isinstance(both["tokens_per_second"], float)
    assert capsys.readouterr().out.startswith("[0] ")
    assert run(tiny, "--prompt", PROMPT, *options) == 0
    assert json.loads(out.read_text())["tokens"] == both["tokens"][0]


def test_chat_goes_through_the_template(tiny, tmp_path):
    out = tmp_path / "out.json"
    options = ["--chat", "--system", "Be brief", "--max-new-tokens", 2, "--json", out]
    assert run(tiny, "--prompt", "Hello", *options) == 0
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    tokenizer = load_model(tiny).require_tokenizer()
    assert json.loads(out.read_text())["prompt_tokens"] == len(tokenizer.encode_chat(messages))


def test_sampling_depends_on_the_seed_alone(tiny, tmp_path):
    def tokens(seed):
        out = tmp_path / "out.json"
        options = ["--temperature", 2.0, "--top-k", 200, "--top-p", 0.99, "--seed", seed]
        options += ["--max-new-tokens", 16, "--ignore-eos", "--attention", "full", "--json", out]
        assert run(tiny, "--prompt", PROMPT, *options) == 0
        return json.loads(out.read_text())["tokens"]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)


def test_stop_string_ends_the_text(tiny, tmp_path):
    out = tmp_path / "out.json"
    options = ["--max-new-tokens", 8, "--ignore-eos", "--attention", "full", "--json", out]
    assert run(tiny, "--prompt", PROMPT, *options) == 0
    text = json.loads(out.read_text())["text"]
    stop = next(c for c in text[1:] if c != "�")
    assert run(tiny, "--prompt", PROMPT, *options, "--stop", stop) == 0
    result = json.loads(out.read_text())
    assert result["text"] == text[: text.index(stop)]
    assert result["finish_reason"] == "stop"


def test_bytes_are_those_of_the_arrays(tiny, tmp_path):
    out = tmp_path / "out.json"
    options = ["--max-new-tokens", 3, "--budget", 16, "--dtype", "bfloat16", "--json", out]
    assert run(tiny, "--prompt", PROMPT, *options) == 0
    model = load_model(tiny, dtype="bfloat16")
    generation = generate(model, PROMPT, attention=Full(), max_new_tokens=3)
    cache = generation.context.cache
    counted = json.loads(out.read_text())["bytes"]
    assert counted["weights"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert counted["kv_cache"] == sum(x.nbytes for x in (*cache.keys, *cache.values))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--attention", "nope"], ["--attention", "nope", "full", "exact", "retopk"]),
        (["--budget", "0"], ["budget=0", ">= 1"]),
        (["--budget", "many"], ["--budget", "many", "int"]),
        (["--recall", "9", "--capacity", "4"], ["recall=9", "capacity=4"]),
        (["--capacity", "0"], ["capacity=0", ">= 1"]),
        (["--window", "-1"], ["window=-1", ">= 0"]),
        (["--tau", "nan"], ["tau=nan", "finite"]),
        (["--refresh", "-3"], ["refresh=-3", ">= 0"]),
        (["--attention", "full", "--tau", "0.9"], ["--tau 0.9", "full", "no options"]),
        (["--attention", "exact", "--window", "4"], ["--window 4", "exact", "takes --budget"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens=0", ">= 1"]),
        (["--temperature", "-1"], ["temperature=-1", ">= 0"]),
        (["--temperature", "1", "--top-p", "1.5"], ["top_p=1.5", "at most 1"]),
        (["--temperature", "1", "--top-k", "-2"], ["top_k=-2", ">= 0"]),
        (["--top-k", "5"], ["--top-k 5", "--temperature"]),
        (["--seed", "-1"], ["--seed=-1", "from 0"]),
        (["--stop", ""], ["--stop", "some text"]),
        (["--system", "x"], ["--system", "--chat"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["--prompt", ""], ["prompt 1 is empty"]),
        (["--prompt-file", "/nowhere/p.txt"], ["--prompt-file", "/nowhere/p.txt", "No such file"]),
        (["--json", "/nowhere/o.json"], ["--json", "/nowhere/o.json", "does not exist"]),
        (["--json", "/"], ["--json", "/", "directory"]),
        (["--unknown"], ["--unknown"]),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(options, parts, monkeypatch, capsys):
    monkeypatch.setattr(
        "retopk_jax.cli_generate.load_model", lambda *_, **__: pytest.fail("loaded")
    )
    arguments = ["generate", "--model", "m", "--prompt", PROMPT, *options]
    try:
        code = main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    printed, complaint = capsys.readouterr()
    assert printed == ""
    assert complaint.count("\n") == 1
    assert complaint.startswith("retopk")
    for part in parts:
        assert part in complaint


def test_no_prompt(tiny, capsys):
    assert run(tiny) == 2
    assert "--prompt" in capsys.readouterr().err


def test_prompt_file_that_is_not_text(tmp_path, capsys):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit) as leaving:
        main(["generate", "--model", "m", "--prompt-file", str(file)])
    assert leaving.value.code == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--model", "/nowhere/model"], "/nowhere/model: no such file"),
        (["--max-new-tokens", "70000"], "70038: the model has 65536 positions"),
    ],
)
def test_bad_model_or_room(tiny, tmp_path, options, part, capsys):
    out = tmp_path / "out.json"
    assert run(tiny, "--prompt", PROMPT, "--json", out, *options) == 2
    complaint = capsys.readouterr().err
    assert part in complaint
    assert "Traceback" not in complaint
    assert not out.exists()


def test_interrupt_is_no_traceback(tiny, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("retopk_jax.cli_generate.generate", interrupted)
    assert run(tiny, "--prompt", PROMPT) == 130
    assert capsys.readouterr().err.strip() == "retopk generate: interrupted"


def test_closed_pipe_is_no_traceback(tiny):
    command = [sys.executable, "-m", "retopk_jax.cli", "generate", "--model", str(tiny)]
    command += ["--prompt", PROMPT, "--max-new-tokens", "40", "--ignore-eos", "--attention", "full"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read().decode()
    assert process.returncode == 141
    assert "Traceback" not in complaint
    assert "BrokenPipe" not in complaint
