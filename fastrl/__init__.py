from fastrl.config import PPOConfig
from fastrl.models import *
