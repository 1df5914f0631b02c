"""What several test files share."""
import numpy as np
import pytest
import torch

import data


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_graphs(request):
    """A test that compiles counts its own graphs: none is left from the test before it."""
    if request.node.get_closest_marker("slow"):
        import torch._dynamo
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.fixture
def one_thread():
    """For matrices so small that they are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A data set of 6,000 bytes to train on and 700 held out: text with a pattern that a small model can learn."""
    folder = tmp_path_factory.mktemp("tiny")
    sums = (b"%d and %d make %d. " % (a, b, a + b) for a in range(20) for b in range(20))
    text = np.frombuffer(b"".join(sums), np.uint8)
    for split, part in (("train", text[:6000]), ("val", text[6000:6700])):
        with data.TokenWriter(folder / f"{split}.bin") as out:
            out.write(np.concatenate(([256], part)).astype(np.uint16))
    data.write_meta(folder, "bytes")
    return folder
