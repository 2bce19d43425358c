"""One training loop for every task. Read in this order:

train.py          the loop: step, report, evaluate, save
training_run.py   what a run is made of; setup.py: all that comes before its first step
state.py          what survives a restart
data/open.py      which batches a step gets
entry.py          how a command becomes settings, and a rank of the run
"""

if __name__ != "rackrun.training":  # a second copy of the package, with other classes
    raise ImportError("import rackrun.training, not training")
