// Lets torch run backward on fake CUDA tensors where there is no GPU: one CUDA device that does nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace {

const Device kOnly(DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device exchangeDevice(Device) const override { return kOnly; }
  Device getDevice() const override { return kOnly; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, &guard);

}  // namespace

// The autograd engine asks these whether there is a device.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

namespace at {
// Before those of a CUDA build, which ask a driver.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, Hooks)
}
