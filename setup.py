"""Packaging of the `appo` distribution."""

from pathlib import Path

from setuptools import find_packages, setup

# Packages of the families of environments, by extra. `envs/families` names the extra of a family.
FAMILIES = {
    "atari": ["ale-py>=0.12", "opencv-python-headless>=4.12"],
    "vizdoom": ["vizdoom>=1.3", "opencv-python-headless>=4.12"],
    "mujoco": ["mujoco>=3.3", "imageio>=2.37"],  # gymnasium imports both, even where nothing is drawn
    "minigrid": ["minigrid>=3.0"],
    "box2d": ["box2d>=2.3.10", "pygame-ce>=2.4"],
    "multiagent": ["pettingzoo>=1.27"],
}
LARGE_FAMILIES = {
    "dm-control": ["shimmy>=2.0", "dm-control>=1.0.30"],
    "highway": ["highway-env>=1.10"],
    "envpool": ["envpool>=1.2"],
}
PLOTS = ["matplotlib>=3.10"]
VIDEO = ["imageio>=2.37", "imageio-ffmpeg>=0.6", "pygame-ce>=2.4"]  # the latter draws classic control
OFFLINE = ["pyarrow>=20", "h5py>=3.12", "pillow>=11"]  # and minari>=0.5.3 for those who want its own loader
ONNX = ["onnx>=1.20", "onnxscript>=0.5", "onnxruntime>=1.23"]
HUB = ["huggingface_hub>=1.0"]
WANDB = ["wandb>=0.20"]
TRACKIO = ["trackio>=0.20"]
TUNE = ["optuna>=5"]
MLFLOW = ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic>=1.13"]  # its default store is a file of sqlite
LZ4 = ["lz4>=4.4"]
RAY = ["ray>=2.55"]  # earlier versions lack the authentication by token
DEV = [
    "pytest>=9",
    "pytest-timeout>=2.4",
    "pytest-xdist>=3.8",
    "hypothesis>=6.150",
    "ruff>=0.15",
    "mypy>=1.19",
    "build>=1.3",
    "types-psutil>=7",
    "pyte>=0.8.2",
    "cpprb>=11; python_version < '3.13'",  # an oracle of prioritised sampling, which has no wheel for newer Pythons
    "ipykernel>=7",
    "nbclient>=0.11",
    "pexpect>=4.9",
]

setup(
    name="appo",
    version="0.1.0",
    description="Asynchronous PPO on one machine: as fast as it allows, and it never hangs silently.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    package_dir={"": "src"},
    packages=find_packages("src"),  # links lead to the folders beside this file
    package_data={"appo": ["py.typed", "algorithms/tools/report/page.*", "utils/synonyms.toml"]},
    install_requires=[
        "torch>=2.11",
        "numpy>=2.0",
        "gymnasium>=1.2",
        "cloudpickle>=3",  # which gymnasium brings anyway
        "faster-fifo>=1.5.2",
        "tensorboardX>=2.6.4",
        "threadpoolctl>=3.5",
        "psutil>=6",
        "safetensors>=0.5",
        "rich>=14",
        "pyyaml>=6",
    ],
    extras_require={
        **FAMILIES,
        **LARGE_FAMILIES,
        "large": [package for packages in LARGE_FAMILIES.values() for package in packages],
        "video": VIDEO,
        "plots": PLOTS,
        "bench": PLOTS,
        "offline": OFFLINE,
        "onnx": ONNX,
        "hub": HUB,
        "wandb": WANDB,
        "trackio": TRACKIO,
        "mlflow": MLFLOW,
        "lz4": LZ4,
        "ray": RAY,
        "tune": TUNE,
        "dev": DEV + ONNX + LZ4 + TUNE + ["minari>=0.5.3"],
        "all": [package for packages in FAMILIES.values() for package in packages] + OFFLINE + VIDEO + PLOTS + LZ4,
    },
    entry_points={"console_scripts": ["appo=appo.algorithms.cli:main"]},
)
