"""A simulated V100: runs sm_70 machine code on numpy arrays and estimates its time. See README.md in this folder.

cubin = Cubin(compile_cuda(source).binary)
kernel = Simulation(cubin, "scale")
x = kernel.map(array)
kernel.launch(grid=(8, 1, 1), block=(128, 1, 1), parameters=pack_parameters(numpy.uint64(x), numpy.float32(2)))
traces = [kernel.trace(i) for i in range(8)]  # the array holds the result now
kernel.time(traces).cycles  # simulated
"""

from kernels.volta.sim.bound import static_bound
from kernels.volta.sim.cubin import Cubin
from kernels.volta.sim.failure import SimulationError
from kernels.volta.sim.gpu import V100, Gpu, Occupancy
from kernels.volta.sim.simulation import Simulation, Trace, pack_parameters
from kernels.volta.sim.timing import HotSpot, SmTime, Timing, default_timing

__all__ = [
    "V100",
    "Cubin",
    "Gpu",
    "HotSpot",
    "Occupancy",
    "Simulation",
    "SimulationError",
    "SmTime",
    "Timing",
    "Trace",
    "default_timing",
    "pack_parameters",
    "static_bound",
]
