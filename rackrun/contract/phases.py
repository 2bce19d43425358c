"""Phases that a rank reports. A launcher shows them, and is patient according to them."""

START = "start"
DOWNLOAD = "download"
COMPILE = "compile"
TRAIN = "train"
EVALUATE = "evaluate"
SAVE = "save"
MEASURE = "measure"
DONE = "done"

PHASES = (START, DOWNLOAD, COMPILE, TRAIN, EVALUATE, SAVE, MEASURE, DONE)
