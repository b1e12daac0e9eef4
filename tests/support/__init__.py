"""What tests share. Whatever is imported from here comes after the simulated device, if any."""

from tests.support import one_gpu
from tests.support.cuda_simulation import is_wanted

if is_wanted():
    from tests.support.cuda_simulation.runtime import activate, activate_in_children

    activate()
    activate_in_children()
elif one_gpu.is_wanted():
    one_gpu.activate()
