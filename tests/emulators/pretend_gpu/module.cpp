// What tests see of the pretend GPU: the module amp_mp_pretend_gpu, in the same library as
// amp_mp._C.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/passes.h"
#include "current_stream.h"
#include "ledger.h"
#include "memory.h"

namespace py = pybind11;

namespace pretend_gpu {
namespace {

void settle_current_device() {
  int device = 0;
  cudaGetDevice(&device);
  settle(c10::Device(c10::kCUDA, c10::DeviceIndex(device)));
}

}  // namespace
}  // namespace pretend_gpu

PYBIND11_MODULE(amp_mp_pretend_gpu, m) {
  using namespace pretend_gpu;
  m.def("open_ledger", &open_ledger);
  m.def("close_ledger", [] {
    Ledger ledger = close_ledger();
    return py::make_tuple(std::move(ledger.operators), std::move(ledger.syncs));
  });
  m.def("counts", [] {
    return py::make_tuple(cuda_on_cpu::counts.synchronisations.load(),
                          cuda_on_cpu::counts.launches.load(),
                          cuda_on_cpu::counts.argument_bytes.load());
  });
  m.def("note_sync", &note_sync, py::arg("name"));
  const py::call_guard<py::gil_scoped_release> without_lock;
  m.def("set_delay", &cuda_on_cpu::set_delay, py::arg("seed"), without_lock);
  m.def("finish_device", &cuda_on_cpu::finish_device, py::arg("device"), without_lock);
  m.def("finish_all", &cuda_on_cpu::finish_all, without_lock);
  m.def("current_stream",
        [](int device) { return current_stream(c10::DeviceIndex(device)).handle; });
  m.def("exchange_stream", [](int device, c10::StreamId stream) {
    return exchange_stream(c10::DeviceIndex(device), stream);
  });
  m.def("settle_address", [] { return reinterpret_cast<uintptr_t>(&settle_current_device); });
  m.def("is_capturing", [] { return cuda_on_cpu::under_way() != nullptr; });
  m.def("set_driver", [](int version) { cuda_on_cpu::driver_version = version; });
  m.def("asked_device", [] { return cuda_on_cpu::asked_device.load(); });
  // What amp_mp says when it allocates memory of the host: beside a capture, or where there is
  // none.
  m.def(
      "allocate_on_host",
      [](bool beside_a_capture, bool has_memory) {
        cuda_on_cpu::Recording recording;
        if (beside_a_capture) recording.begin();
        cuda_on_cpu::has_host_memory = has_memory;
        void* piece = nullptr;
        const char* error = nullptr;  // three halves of a slab: one of them needs a new slab
        for (int i = 0; i < 3 && !error; ++i)
          error = amp_mp::cuda::allocate_for_both(1 << 15, piece);
        cuda_on_cpu::has_host_memory = true;
        if (beside_a_capture) recording.end();
        return std::string(error ? error : "");
      },
      py::arg("beside_a_capture"), py::arg("has_memory"));
  m.def(
      "set_host_memory",
      [](bool is_there, bool is_mapped) {
        cuda_on_cpu::has_host_memory = is_there;
        cuda_on_cpu::maps_host_memory = is_mapped;
      },
      py::arg("is_there") = true, py::arg("is_mapped") = true);
  m.def("host_memory", [] {
    const cuda_on_cpu::HostMemory found = cuda_on_cpu::host_memory();
    return py::make_tuple(found.bytes, found.freed_too_early);
  });
  m.def("device_count", [] {
    int count = 0;
    cudaGetDeviceCount(&count);
    return count;
  });
  m.def("current_device", [] {
    int device = 0;
    cudaGetDevice(&device);
    return device;
  });
  m.def(
      "set_device",
      [](int device) {
        if (cudaSetDevice(device) != cudaSuccess)
          throw py::value_error("pretend GPU: there is no device " + std::to_string(device));
      },
      py::arg("device"));
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("launches", &Graph::launches);
}
