"""Training on a GPU: precision, compilation, layout, memory, and how a run is resumed."""

import gzip
import json

import pytest

pytestmark = pytest.mark.gpu


def test_batches_travel_to_the_gpu_from_pinned_memory(train):
    run = train(width=8, profile_steps="2,4")
    trace = json.loads(gzip.decompress((run.path / "trace.json.gz").read_bytes()))
    batch_bytes = 12 * 3 * 32 * 32
    copies = [
        event["name"]
        for event in trace["traceEvents"]
        if "HtoD" in event.get("name", "") and event["args"]["bytes"] == batch_bytes
    ]
    assert copies and all("Pinned" in name for name in copies), copies


def test_losses_in_half_precision_are_close_to_those_in_float32(train):
    exact, bfloat16, float16 = (
        train(width=8, precision=precision) for precision in ("fp32", "bf16", "fp16")
    )
    assert len(exact.losses) == 6
    assert bfloat16.losses != exact.losses != float16.losses
    assert bfloat16.losses == pytest.approx(exact.losses, abs=0.03)
    assert float16.losses == pytest.approx(exact.losses, abs=0.03)
    assert all(line["loss_scale"] >= 1 for line in float16.steps.values())


def test_a_compiled_model_trains_as_an_eager_one(train, tmp_path):
    eager = train(width=8, precision="fp32")
    compiled = train(width=8, precision="fp32", compile=True)
    assert any((tmp_path / "home/.cache/rackrun/inductor").rglob("*.py")), "nothing was compiled"
    assert compiled.losses == pytest.approx(eager.losses, abs=0.003)


def test_channels_last_changes_the_layout_and_not_the_losses(train, seen):
    settings = {"model": "watched:Watched", "precision": "fp32"}
    runs = [train(**settings, channels_last=layout) for layout in ("on", "off")]
    assert [note["channels_last"] for note in seen()] == [True] * 6 + [False] * 6
    assert runs[0].losses == pytest.approx(runs[1].losses, abs=0.001)


def test_peak_memory_is_reported_and_an_evaluation_leaves_none_in_use(train, seen):
    """usage.jsonl has a line every 3 s, and nvidia-smi counts CUDA's own memory, too."""
    slowly = "--nproc 1 --env SECONDS_PER_STEP=1"
    run = train(slowly, model="watched:Watched", epochs=4, image_size=256)
    notes = seen()
    assert len(notes) == 12
    usage = [json.loads(line) for line in run.usage.read_text().splitlines()]
    reported = max(gpu["memory"] for line in usage for gpu in line["gpus"])
    assert reported >= notes[-1]["peak"] >> 20 > 0
    second_steps = [notes[number]["allocated"] for number in (4, 7, 10)]
    assert max(second_steps) - min(second_steps) < 1 << 20, "each follows an evaluation"


def test_a_run_resumed_on_a_gpu_goes_on_from_its_checkpoint(train):
    settings = {"width": 8, "precision": "fp32", "epochs": 4}
    whole = train(**settings)
    rest = train(**settings, resume=whole.checkpoint(6))
    ended = whole.steps[12]["time"]
    trained = [number for number, line in rest.steps.items() if line["time"] > ended]
    assert trained == [7, 8, 9, 10, 11, 12]
    assert rest.losses == pytest.approx(whole.losses, abs=0.003)
