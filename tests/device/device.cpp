// What torch's core asks a device for, in a build without CUDA: a guard, which guards nothing, and
// hooks, with pinned memory, which is the host's own and knows that it was asked for.
//
// pretended_on() puts them in the place of torch's, pretended_off() puts torch's back.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kDevice(DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream) const noexcept override {
    return Stream(Stream::DEFAULT, kDevice);
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};

std::mutex mutex;
std::map<const char*, size_t> blocks;  // of pinned memory

void release(void* memory) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    blocks.erase(static_cast<const char*>(memory));
  }
  c10::free_cpu(memory);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = c10::alloc_cpu(size ? size : 1);
    std::lock_guard<std::mutex> lock(mutex);
    blocks[static_cast<const char*>(memory)] = size ? size : 1;
    return {memory, memory, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static Pinned pinned;
    return &pinned;
  }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto behind = blocks.upper_bound(static_cast<const char*>(pointer));
    if (behind == blocks.begin()) {
      return false;
    }
    --behind;
    return static_cast<const char*>(pointer) < behind->first + behind->second;
  }
};

// torch has made its hooks by now, or makes them here, once and for all: objects without members,
// which are told apart by their table of functions alone.
void*& table_of(const at::CUDAHooksInterface& hooks) {
  return *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&hooks));
}

void* tables_before = nullptr;

}  // namespace

extern "C" void pretended_on() {
  static Guard guard;
  static Hooks hooks;
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface), "hooks have members");
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  void*& table = table_of(at::detail::getCUDAHooks());
  tables_before = table;
  table = table_of(hooks);
}

extern "C" void pretended_off() {
  table_of(at::detail::getCUDAHooks()) = tables_before;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(nullptr);
}
