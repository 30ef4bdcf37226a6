"""`tfgrpo route`: from a file of outcomes to a decision, and saved routers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.routing.worlds import make_world
from tfgrpo.cli.route import app
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.routing.records import ModelInfo
from tfgrpo.routing.router_files import RouterFiles, fit_files


@pytest.fixture
def data(tmp_path):
    world = make_world(150, 4)
    path = tmp_path / "outcomes.jsonl"
    with path.open("w") as file:
        for name in world.table.model_names:
            for o in world.table.outcomes(name):
                file.write(json.dumps({**o.to_dict(), "output_tokens": 20}) + "\n")
    models = tmp_path / "models.json"
    prices = [{"name": f"m{j}", "input_usd_per_mtok": j + 1, "output_usd_per_mtok": 2 * j + 1}
              for j in range(4)]  # fmt: skip
    models.write_text(json.dumps(prices))
    return path, models


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_fit_ask_and_onboard(tmp_path, data):
    path, models = data
    folder = tmp_path / "router"
    fitted = json.loads(run("fit", path, "--out", folder, "--models", models, "--json"))
    assert fitted["reference_models"] == ["m0", "m1", "m2", "m3"]
    decision = json.loads(run("ask", folder, "compute the integral of", "--per-usd", 1, "--json"))
    assert decision["model"] in fitted["models"]
    assert {c["model"] for c in decision["ranking"]} == set(fitted["models"])
    text = run("ask", folder, "prove the theorem", "--target", 0.6)
    assert "n_eff" in text
    for method in ("gain", "k_centre", "random"):
        chosen = [json.loads(x) for x in run("onboard", folder, "--model", "new", "-n", 5,
                                             "--method", method).splitlines()]  # fmt: skip
        assert len({c["prompt_id"] for c in chosen}) == 5
    answers = tmp_path / "new.jsonl"
    rows = [{**c, "model": "new", "reward": 1.0} for c in chosen]
    answers.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert "5 outcomes of new added" in run(
        "onboard", folder, "--model", "new", "--outcomes", answers
    )
    again = json.loads(run("ask", folder, "prove the theorem", "--per-usd", 0, "--json"))
    assert "new" in {c["model"] for c in again["ranking"]}


def test_eval_prints_every_method_and_writes_a_plot(tmp_path, data):
    path, _ = data
    row = json.loads(run("eval", path, "--sizes", "8,32", "--draws", 1, "--json"))
    assert {r["method"] for r in row["rows"]} >= {"mean", "full", "beta_knn20", "ridge"}
    assert 0 < row["best_single"] <= row["oracle"] <= 1
    plot = tmp_path / "x.svg"
    text = run("eval", path, "--sizes", "8,32", "--draws", 1, "--plot", plot)
    assert "best_single" in text
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "DATA", "--sizes", "few"], "sizes 'few'"),
        (["ask", "ROUTER", "hi", "--target", "0.5", "--per-usd", "1"], "not both"),
        (["onboard", "ROUTER", "--model", "x", "--method", "best"], "method 'best'"),
        (["onboard", "ROUTER", "--model", "x", "--outcomes", "DATA"], "no outcome of model 'x'"),
    ],
)
def test_wrong_settings_are_config_errors(tmp_path, data, arguments, words):
    folder = tmp_path / "router"
    run("fit", data[0], "--out", folder)
    named = [str({"DATA": data[0], "ROUTER": folder}.get(a, a)) for a in arguments]
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, named, catch_exceptions=False)


def test_a_saved_router_predicts_as_before_and_damage_is_refused(tmp_path):
    world = make_world(150, 4)
    rows = [o for name in world.table.model_names for o in world.table.outcomes(name)]
    files = fit_files(rows, [ModelInfo("m0", "f0", 1.0, 2.0)])
    files.save(tmp_path)
    loaded = RouterFiles.load(tmp_path)
    assert loaded.models[0].input_usd_per_mtok == 1.0
    asked = ["compute the integral of the function number 7"]
    before = files.value.state(rows[:40]).predict(asked)
    after = loaded.value.state(rows[:40]).predict(asked)
    np.testing.assert_allclose(before.mean, after.mean, atol=2e-3)
    (pool,) = tmp_path.glob("v-*/pool.npz")
    raw = bytearray(pool.read_bytes())
    raw[50] ^= 1
    pool.write_bytes(bytes(raw))
    with pytest.raises(StoreError, match="not the file that was saved"):
        RouterFiles.load(tmp_path)
    with pytest.raises(StoreError, match="no router"):
        RouterFiles.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no outcomes"):
        fit_files([])


def test_eval_draws_quality_against_cost_where_costs_are_known(tmp_path, data):
    path, models = data
    plot = tmp_path / "cost.svg"
    arguments = ["eval", path, "--models", models, "--sizes", "16", "--draws", 1]
    row = json.loads(run(*arguments, "--cost-plot", plot, "--json"))
    assert plot.stat().st_size > 1000
    standings = {d["method"]: d for d in row["decisions"]}
    assert set(standings) == {"ours", "ridge", "weighted_knn", "blend"}
    for d in standings.values():
        assert d["gap_closed_ci"][0] <= d["gap_closed"] <= d["gap_closed_ci"][1]
        assert 0 < d["routed"] <= 1 and 0 < d["aiq"] <= 1
    assert standings["ours"]["routed_less_ours"] == [0.0, 0.0, 0.0]
    assert "AIQ less ours" in run(*arguments, "--cost-plot", plot)
    with pytest.raises(ConfigError, match="give prices"):
        run("eval", path, "--sizes", "16", "--draws", 1, "--cost-plot", plot)


def test_eval_can_write_cost_against_quality_as_a_page(tmp_path, data):
    path, models = data
    plot = tmp_path / "cost.html"
    run("eval", path, "--models", models, "--sizes", "16", "--draws", 1, "--cost-plot", plot)
    page = plot.read_text(encoding="utf-8")
    assert 'content="tfgrpo routing"' in page and "this router" in page
    for words in ("oracle", "single models, mixed", "way from best model to oracle"):
        assert words in page, words


def test_a_calibrated_router_keeps_its_promise_in_the_folder(tmp_path):
    """Half of the prompts are easy for the cheap model: those may stay on it, and the rest not."""

    def rows(numbers):
        for i in numbers:
            easy = i % 2 == 0
            text = f"translate word {i}" if easy else f"prove the deep theorem {i}"
            for name, reward in (("small", float(easy)), ("big", 1.0)):
                yield {"prompt": text, "model": name, "reward": reward, "output_tokens": 10}

    fitted, held, models = (tmp_path / n for n in ("fit.jsonl", "held.jsonl", "models.json"))
    fitted.write_text("".join(json.dumps(r) + "\n" for r in rows(range(200))))
    shouted = [{**r, "prompt": r["prompt"].upper()} for r in rows(range(150, 200))]  # seen before
    held.write_text("".join(json.dumps(r) + "\n" for r in [*shouted, *rows(range(200, 600))]))
    models.write_text(json.dumps([
        {"name": "small", "input_usd_per_mtok": 0.1, "output_usd_per_mtok": 0.1},
        {"name": "big", "input_usd_per_mtok": 10, "output_usd_per_mtok": 10},
    ]))  # fmt: skip
    folder = tmp_path / "router"
    run("fit", fitted, "--out", folder, "--models", models)
    before = run("calibrate", folder, held, "--delta", 0.03, "--dry-run")
    assert "what could be had at 3.0%: " in before and "nothing was changed" in before
    found = json.loads(run("calibrate", folder, held, "--delta", 0.03, "--json"))
    assert (found["against"], found["prompts"], found["left_out_seen"]) == ("big", 400, 50)
    assert found["gates"]["small"]["observed"] <= 0.03
    assert 0.4 < found["coverage"] <= found["attainable"] < 0.6
    for text, model in (("translate word 7000", "small"), ("prove the deep theorem 7001", "big")):
        decision = json.loads(run("ask", folder, text, "--json"))
        assert decision["model"] == model, decision["reason"]
    impossible = run("calibrate", folder, held, "--risk", "failure", "--delta", 0.001)
    assert "promise: none" in impossible and "least level" in impossible
    assert json.loads(run("ask", folder, "translate word 7000", "--json"))["model"] == "big"
    for wrong, words in ((fitted, "kept apart"), (held, "unknown to this router")):
        more = ["--against", "huge"] if wrong is held else []
        with pytest.raises(ConfigError, match=words):
            run("calibrate", folder, wrong, *more)


def test_serve_puts_the_routers_models_behind_one_name(tmp_path, data, monkeypatch):
    folder, seen = tmp_path / "router", {}
    run("fit", data[0], "--out", folder)
    monkeypatch.setattr(
        "tfgrpo.cli.serve.run_gateway", lambda read, **more: seen.update(s=read(), **more)
    )
    run("serve", folder, "--lm", "m0=http://127.0.0.1:1/v1#a", "--lm", "m1=http://127.0.0.1:1/v1#b",
        "--per-usd", 5, "--listen", "127.0.0.1:0")  # fmt: skip
    route = seen["s"].routes["auto"]
    assert (route.upstreams, route.router, route.rule.per_usd) == (("m0", "m1"), str(folder), 5.0)
    assert seen["s"].upstreams["m1"].lm == "http://127.0.0.1:1/v1#b"
    assert seen["listen"] == "127.0.0.1:0"
    for more, words in (([], "are not specs"), (["--lm", "m0"], "NAME=SPEC")):
        with pytest.raises(ConfigError, match=words):
            run("serve", folder, *more)
