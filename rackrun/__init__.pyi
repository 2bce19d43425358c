from rackrun.launcher import launch as launch
from rackrun.reports import report as report
from rackrun.shards.open import open_source as open_source
from rackrun.shards.samples import samples as samples
from rackrun.training.trained import load_of_any_task as load_of_any_task

load_model = load_of_any_task
__version__: str
PUBLIC: dict[str, str]
