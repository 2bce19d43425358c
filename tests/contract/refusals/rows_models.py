"""Refusals of what is done with a model: predict, evaluate, export, models."""

from zipfile import ZIP_DEFLATED

from tests.contract.refusals.rows_train import DATA, FIRST_RUN, RUNS
from tests.lab.data import drawn
from tests.lab.refusal import Refusal
from tests.lab.sources import below, classes, cut, flipped, made_by, removed, zipped

FINAL = f"{FIRST_RUN}/final.pt"
IMAGE = {"cat.jpg": drawn("cat")}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
SCRIPT = zipped({"net/code/__torch__.py": b"x" * 99, "net/data.pkl": b""}, ZIP_DEFLATED)
PREDICT = f"rackrun predict {FIRST_RUN}"
PREDICTIONS = [
    Refusal("rackrun predict", 64, "CHECKPOINT"),
    Refusal("rackrun predict final.pt", 64, "no images"),
    Refusal("rackrun predict final.pt '/dev/null/*.jpg'", 64, "/dev/null/*.jpg"),
    Refusal("rackrun predict final.pt photos", 64, "photos", {"photos/": ""}),
    Refusal("rackrun predict runs/none cat.jpg", 64, "runs/none", IMAGE),
    Refusal(f"{PREDICT}7 cat.jpg", 64, (f"{FIRST_RUN}7", f"type {FIRST_RUN}"), RUNS | IMAGE),
    Refusal(f"{PREDICT} cat.jpg --top-k 0", 64, "--top-k 0", RUNS | IMAGE),
    Refusal(f"{PREDICT} cat.jpg --csv none/a.csv", 64, "none", RUNS | IMAGE),
    Refusal(
        f"{PREDICT} cat.jpg --csv labels.csv",
        64,
        "labels.csv: another file",
        RUNS | IMAGE | {"labels.csv": "path,label\ncat.jpg,cat\n"},
    ),
    Refusal(f"{PREDICT} https://x.org/cat.jpg", 64, ("https://x.org/cat.jpg", "download"), RUNS),
    Refusal(f"{PREDICT} cat.jpg --device cuda", 64, "--device cuda", RUNS | IMAGE),
    Refusal(f"{PREDICT} cat.jpg --device tpu", 64, "--device tpu", RUNS | IMAGE),
    Refusal(f"{PREDICT} none.jpg", 65, "none.jpg", RUNS),
    Refusal(f"{PREDICT} cat.jpg", 65, "cat.jpg", RUNS | {"cat.jpg": ""}),
    Refusal(f"{PREDICT} cat.jpg", 65, "cat.jpg", RUNS | {"cat.jpg": IMAGE["cat.jpg"][:-300]}),
    Refusal(f"{PREDICT} cat.jpg", 74, FINAL, RUNS | IMAGE | {FINAL: flipped(5000)}),
    Refusal(f"{PREDICT} cat.jpg", 74, FINAL, RUNS | IMAGE | {FINAL: cut(-1000)}),
    Refusal(f"rackrun predict {FINAL} cat.jpg", 64, FINAL, RUNS | IMAGE | {FINAL: removed}),
    Refusal("rackrun predict page.pt cat.jpg", 74, "page.pt", IMAGE | {"page.pt": "<html>404"}),
    *(
        Refusal(
            f"rackrun predict --weights {file} --model resnet18 --classes names cat.jpg",
            code,
            what,
            IMAGE | {"names": "a\nb\n", "lfs.pt": LFS, "jit.pt": SCRIPT},
        )
        for file, code, what in (
            ("https://x.org/w.pt", 64, ("https://x.org/w.pt", "download")),
            ("missing.pt", 64, "--weights missing.pt: no such file"),
            ("lfs.pt", 74, "git lfs pull"),
            ("jit.pt", 74, "TorchScript"),
        )
    ),
    Refusal(f"{PREDICT} cat.jpg --classes names", 64, "--classes", RUNS | IMAGE | {"names": "a"}),
    Refusal("rackrun predict --weights w.pt --model a:B cat.jpg", 64, "--classes", IMAGE),
    Refusal(f"python -m rackrun.imagenet predict {FINAL} cat.jpg", 74, "catdog", RUNS | IMAGE),
]

EVALUATE = f"rackrun evaluate {FIRST_RUN} data --workers 0 --device cpu"
EVALUATIONS = [
    Refusal("rackrun evaluate", 64, "CHECKPOINT"),
    Refusal("rackrun evaluate runs/none data", 64, "runs/none", DATA),
    Refusal(f"rackrun evaluate {FIRST_RUN} nowhere", 64, "nowhere", RUNS),
    Refusal("rackrun evaluate data data --device cpu", 74, ("data", "final.pt"), DATA),
    Refusal(f"{EVALUATE} --split test", 64, ("--split", "train"), RUNS),
    Refusal(f"{EVALUATE} --csv 'my tables/all.csv'", 64, "mkdir -p 'my tables'", RUNS),
    Refusal(
        f"{EVALUATE} --csv all.csv", 64, "all.csv: another file", RUNS | {"all.csv": "image,rank\n"}
    ),
    Refusal(f"{EVALUATE} --batch-size 0", 64, "--batch-size 0", RUNS),
    Refusal(f"{EVALUATE} --csv /no/such/table.csv", 64, "/no/such", RUNS),
]

OTHERS = {
    "more": made_by(
        "rackrun convert folder photos more --workers 1",
        name="more",
        **below("photos", classes(4, "box", "cross", "disc")),
    )
}
EVALUATIONS += [
    Refusal(f"rackrun evaluate {FIRST_RUN} more --device cpu", 64, "cross", RUNS | OTHERS),
    Refusal(f"rackrun doctor more {FIRST_RUN}", 64, "cross", RUNS | OTHERS),
]

EXPORTS = [
    Refusal(f"rackrun export {FIRST_RUN} model.bin", 64, ("model.bin", ".onnx"), RUNS),
    Refusal(f"rackrun export {FIRST_RUN} none/model.onnx", 64, "none", RUNS),
    Refusal("rackrun export runs/none model.onnx", 64, "runs/none"),
    Refusal("rackrun models resnet19", 64, ("resnet19", "did you mean resnet18")),
]

ROWS = [*PREDICTIONS, *EVALUATIONS, *EXPORTS]
