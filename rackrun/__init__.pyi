from rackrun.errors import Problem as Problem
from rackrun.launcher import launch as launch
from rackrun.nginx.serve import serving as serving
from rackrun.nginx.site import Site as Site
from rackrun.reports import report as report
from rackrun.run_folder import RunFolder as RunFolder
from rackrun.shards.open import open_source as open_source
from rackrun.shards.samples import samples as samples
from rackrun.training.config import Config as Config
from rackrun.training.data.sampler import ExactSampler as ExactSampler
from rackrun.training.data.transforms import Transforms as Transforms
from rackrun.training.data.transforms import augmented as augmented
from rackrun.training.from_python import load_checkpoint as load_checkpoint
from rackrun.training.from_python import train as train
from rackrun.training.task import Task as Task
from rackrun.training.trained import load_of_any_task as load_of_any_task

load_model = load_of_any_task
__version__: str
PUBLIC: dict[str, str]
