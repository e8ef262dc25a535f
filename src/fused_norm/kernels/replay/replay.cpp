// An operator without Python: what its Python code allocates and launches for some tensors is recorded once
// (recorder.py) and then replayed for all that are like them, in the forward and, by a node of autograd, in the backward.
//
// Two sets of tensors are alike where dtypes, shapes, strides, device, alignment to 16 bytes, which of them share an address
// and which want a gradient agree, the other arguments are equal, and so are the stream and whether it is being captured.
// What no recording can express stays with Python: a forward then returns NotImplemented, a backward calls it.

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr size_t kMostParameters = 64;  // of a kernel

// What cuLaunchKernelEx takes: CUlaunchAttribute and CUlaunchConfig, whose layout is the driver's ABI.
struct LaunchAttribute {
  int id;
  int value[17];  // from the second on
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

constexpr int kProgrammaticStreamSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

// The functions of the driver and of torch's CUDA half, which is not linked: Python finds their addresses.
struct Driver {
  int (*current_stream)(int32_t device, void** stream) = nullptr;
  int (*is_capturing)(void* stream, int* status) = nullptr;
  int (*get_context)(void** context) = nullptr;
  int (*retain_context)(void** context, int device) = nullptr;
  int (*set_context)(void* context) = nullptr;
  int (*launch)(const LaunchConfig* config, void* function, void** parameters, void** extra) = nullptr;
  c10::DeviceType device_type = c10::DeviceType::CUDA;
  bool allocator_is_registered = true;  // or else PyTorch alone knows the allocator that somebody put in its place
} driver;

// Triton's settings: their hooks are chains of callables that want to see every launch. Chains may be replaced at any
// time, by anything that can be called.
PyObject* launch_knobs = nullptr;

// Whether anybody wants to see launches, which are Python's then; asked with the GIL held.
bool launches_are_watched() {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("launch_enter_hook"), PyUnicode_InternFromString("launch_exit_hook")};
  static PyObject* const calls = PyUnicode_InternFromString("calls");
  for (PyObject* name : names) {
    PyObject* hook = PyObject_GetAttr(launch_knobs, name);
    PyObject* watchers = hook == nullptr || hook == Py_None ? nullptr : PyObject_GetAttr(hook, calls);
    const bool nobody = hook == Py_None || (watchers != nullptr && PyList_Check(watchers) && Py_SIZE(watchers) == 0);
    PyErr_Clear();
    Py_XDECREF(watchers);
    Py_XDECREF(hook);
    if (!nobody) {
      return true;
    }
  }
  return false;
}

void check(int status, const char* what) {
  TORCH_CHECK(status == 0, "fused_norm: ", what, " failed with CUDA driver error ", status);
}

// A thread of autograd may come here before it has asked CUDA for anything.
void ensure_context(c10::Device device) {
  void* context = nullptr;
  check(driver.get_context(&context), "cuCtxGetCurrent");
  if (context == nullptr) {
    check(driver.retain_context(&context, device.index()), "cuDevicePrimaryCtxRetain");
    check(driver.set_context(context), "cuCtxSetCurrent");
  }
}

// A Python object that may be dropped by any thread.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() {
    if (object_ != nullptr && Py_IsInitialized()) {
      PyGILState_STATE state = PyGILState_Ensure();
      Py_DECREF(object_);
      PyGILState_Release(state);
    }
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// The Python error that is set goes on as an exception of ours.
[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// Takes over a new reference; a null one is a Python error.
Owned own(PyObject* object) {
  if (object == nullptr) {
    throw_python_error();
  }
  return Owned(object);
}

// ---- Programs: what Python recorded ----

using Tensors = c10::SmallVector<Tensor, 24>;

struct Allocation {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct Parameter {
  int64_t slot;    // of the tensor whose address is passed, or -1
  uint64_t value;  // what is passed instead, in the low bytes
};

struct Kernel {
  void* function;
  unsigned grid_x, grid_y, threads, shared_bytes;
  bool overlaps;  // begins before the one in front of it ends, and waits for it itself
  std::vector<Parameter> parameters;
};

// Tensors have slots: first the inputs, then what is allocated; -1 is none.
struct Program {
  std::vector<Allocation> allocations;
  std::vector<Kernel> kernels;
  std::vector<int64_t> results, saved;

  // Appends to `slots`, which holds the inputs.
  void run(Tensors& slots, c10::Device device, void* stream) const {
    const c10::DispatchKeySet keys(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
    c10::Allocator* allocator = c10::GetAllocator(device.type());
    // Deterministic mode fills what is empty; otherwise the dispatcher need not be asked.
    const bool dispatched = !driver.allocator_is_registered ||
        (at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory());
    for (const Allocation& one : allocations) {
      slots.push_back(
          dispatched ? at::empty_strided(one.sizes, one.strides, at::dtype(one.dtype).device(device))
                     : Tensor(at::detail::empty_strided_generic(one.sizes, one.strides, allocator, keys, one.dtype)));
    }
    uint64_t values[kMostParameters];
    void* pointers[kMostParameters];
    for (const Kernel& kernel : kernels) {
      size_t count = 0;
      for (const Parameter& parameter : kernel.parameters) {
        uint64_t value = parameter.value;
        if (parameter.slot >= 0) {
          value = reinterpret_cast<uint64_t>(slots[parameter.slot].data_ptr());
        }
        values[count] = value;
        pointers[count] = &values[count];
        ++count;
      }
      LaunchAttribute overlap{kProgrammaticStreamSerialization, {0, 1}};
      const LaunchConfig config{
          {kernel.grid_x, kernel.grid_y, 1}, {kernel.threads, 1, 1}, kernel.shared_bytes, stream, &overlap,
          kernel.overlaps};
      check(driver.launch(&config, kernel.function, pointers, nullptr), "a kernel launch");
    }
  }

  Tensor result(const Tensors& slots, size_t index) const {
    return results[index] < 0 ? Tensor() : slots[results[index]];
  }
};

int64_t integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    throw_python_error();
  }
  return value;
}

template <typename Value, typename Convert>
std::vector<Value> sequence(PyObject* object, Convert convert) {
  Owned fast = own(PySequence_Fast(object, "fused_norm: a recording holds sequences"));
  std::vector<Value> values;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(fast.get());
  values.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    values.push_back(convert(PySequence_Fast_GET_ITEM(fast.get(), i)));
  }
  return values;
}

std::vector<int64_t> integers(PyObject* object) {
  return sequence<int64_t>(object, integer);
}

PyObject* item(PyObject* tuple, Py_ssize_t index) {
  TORCH_CHECK(PyTuple_Check(tuple) && index < PyTuple_GET_SIZE(tuple), "fused_norm: a recording is malformed");
  return PyTuple_GET_ITEM(tuple, index);
}

// From what `Recorder.program` returns.
Program program_of(PyObject* recorded) {
  Program program;
  program.allocations = sequence<Allocation>(item(recorded, 0), [](PyObject* one) {
    PyObject* dtype = item(one, 2);
    TORCH_CHECK(THPDtype_Check(dtype), "fused_norm: an allocation has a dtype");
    return Allocation{
        integers(item(one, 0)), integers(item(one, 1)), reinterpret_cast<THPDtype*>(dtype)->scalar_type};
  });
  program.kernels = sequence<Kernel>(item(recorded, 1), [](PyObject* one) {
    Kernel kernel{
        reinterpret_cast<void*>(integer(item(one, 0))),
        static_cast<unsigned>(integer(item(one, 1))),
        static_cast<unsigned>(integer(item(one, 2))),
        static_cast<unsigned>(integer(item(one, 3))),
        static_cast<unsigned>(integer(item(one, 4))),
        integer(item(one, 5)) != 0,
        sequence<Parameter>(item(one, 6), [](PyObject* parameter) {
          return Parameter{integer(item(parameter, 0)), static_cast<uint64_t>(integer(item(parameter, 1)))};
        })};
    TORCH_CHECK(kernel.parameters.size() <= kMostParameters, "fused_norm: a kernel has too many parameters");
    return kernel;
  });
  program.results = integers(item(recorded, 2));
  program.saved = integers(item(recorded, 3));
  return program;
}

// ---- Signatures: which tensors are alike ----

using Key = c10::SmallVector<int64_t, 96>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (const int64_t word : key) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// Whether kernels can be launched on a tensor without anyone having to be asked.
bool is_plain(const Tensor& tensor, c10::Device device) {
  using c10::DispatchKey;
  static const uint64_t allowed =
      (c10::DispatchKeySet(DispatchKey::CPU) | c10::DispatchKeySet(DispatchKey::CUDA) |
       c10::DispatchKeySet(DispatchKey::AutogradCPU) | c10::DispatchKeySet(DispatchKey::AutogradCUDA) |
       c10::DispatchKeySet(DispatchKey::AutocastCPU) | c10::DispatchKeySet(DispatchKey::AutocastCUDA) |
       c10::DispatchKeySet(DispatchKey::ADInplaceOrView))
          .raw_repr();
  return (tensor.key_set().raw_repr() & ~allowed) == 0 && tensor.device() == device && tensor.numel() != 0 &&
      !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !tensor._fw_grad(0).defined();
}

// Adds to the key all that a recording depends on; false where the tensors are not for recordings.
bool describe(Key& key, const Tensor* tensors, size_t count, c10::Device device) {
  c10::SmallVector<uint64_t, 16> addresses;
  for (size_t i = 0; i < count; ++i) {
    const Tensor& tensor = tensors[i];
    addresses.push_back(0);
    if (!tensor.defined()) {
      key.push_back(-1);
      continue;
    }
    if (!is_plain(tensor, device)) {
      return false;
    }
    const uint64_t address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    size_t twin = 0;
    while (addresses[twin] != address && twin < i) {
      ++twin;
    }
    addresses[i] = address;
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    key.push_back(
        static_cast<int64_t>(tensor.scalar_type()) | (address % 16 == 0) << 8 | tensor.requires_grad() << 9 |
        static_cast<int64_t>(twin) << 16 | static_cast<int64_t>(sizes.size()) << 32);
    key.append(sizes.begin(), sizes.end());
    key.append(strides.begin(), strides.end());
  }
  return true;
}

// Adds a plain value; false for a kind that recordings do not know. Strings are told apart by their address.
bool describe(Key& key, PyObject* value) {
  if (value == Py_None || value == Py_True || value == Py_False || PyUnicode_CheckExact(value)) {
    key.push_back(reinterpret_cast<int64_t>(value));
    return true;
  }
  int64_t word = 0;
  if (PyFloat_CheckExact(value)) {
    const double number = PyFloat_AS_DOUBLE(value);
    static_assert(sizeof(number) == sizeof(word));
    std::memcpy(&word, &number, sizeof(word));
  } else if (PyLong_CheckExact(value)) {
    word = PyLong_AsLongLong(value);
    if (word == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
  } else {
    return false;
  }
  key.push_back(PyFloat_CheckExact(value));
  key.push_back(word);
  return true;
}

// Adds where kernels would run.
void* describe_stream(Key& key, c10::Device device) {
  ensure_context(device);
  void* stream = nullptr;
  check(driver.current_stream(device.index(), &stream), "asking for the current stream");
  int capturing = 0;
  check(driver.is_capturing(stream, &capturing), "cuStreamIsCapturing");
  key.push_back(reinterpret_cast<int64_t>(stream));
  key.push_back(capturing);
  return stream;
}

// Whether somebody looks between a call and its kernels: a dispatch mode, a transform, a tracer.
bool calls_are_watched() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_.raw_repr() & ~c10::default_included_set.raw_repr()) != 0;
}

template <typename Recorded>
using Recordings = std::unordered_map<Key, std::shared_ptr<Recorded>, KeyHash>;

// A forward's recording, and those of the backwards behind it.
struct Signature {
  bool recorded = false;  // or else it is Python's
  Program program;
  Owned known;      // what the backward's Python wants to know of the forward
  Owned arguments;  // keeps alive what the key has the address of
  std::mutex mutex;
  Recordings<Program> backwards;  // null for one that is Python's
};

struct Operation {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* record_forward;
  PyObject* record_backward;
  PyObject* backward;
  std::string name;
  Py_ssize_t tensors, values;
  size_t limit;  // of recordings, and of the backwards behind each; what goes through more of them starts anew
  Recordings<Signature> signatures;
  std::atomic<int64_t> forwards, backwards;  // replayed
};

Owned tuple_of(const Tensor* tensors, size_t count) {
  Owned tuple = own(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(tuple.get(), i, THPVariable_Wrap(tensors[i]));
  }
  return tuple;
}

// ---- The node of autograd ----

struct ReplayNode : public Node {
  ReplayNode(Operation* operation, std::shared_ptr<Signature> signature, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), operation(operation), signature(std::move(signature)) {}

  std::string name() const override { return operation->name + "Backward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& variable : saved) {
      variable.reset_data();
    }
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(
        false, name(), " is native, and compiled autograd cannot trace it; set FUSED_NORM_NATIVE=0 to go without");
  }

  variable_list apply(variable_list&& gradients) override {
    Tensors inputs;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const SavedVariable& variable : saved) {
        inputs.push_back(variable.unpack(getptr()));
      }
    }
    for (Tensor& gradient : gradients) {
      inputs.push_back(std::move(gradient));
    }
    Key key;
    const c10::Device device = input_metadata(0).device();
    const c10::DeviceGuard guard(device);
    if (at::GradMode::is_enabled() || calls_are_watched()) {
      return in_python(inputs);
    }
    {
      pybind11::gil_scoped_acquire gil;
      if (launches_are_watched()) {
        return in_python(inputs);
      }
    }
    void* stream = describe_stream(key, device);
    if (!describe(key, inputs.data(), inputs.size(), device)) {
      return in_python(inputs);
    }
    const std::shared_ptr<Program> program = program_for(key, inputs);
    if (program == nullptr) {
      return in_python(inputs);
    }
    program->run(inputs, device, stream);
    operation->backwards.fetch_add(1, std::memory_order_relaxed);
    variable_list found;
    found.reserve(num_outputs());
    for (size_t i = 0; i < num_outputs(); ++i) {
      found.push_back(program->result(inputs, i));
    }
    return found;
  }

  std::shared_ptr<Program> program_for(const Key& key, const Tensors& inputs) {
    {
      std::lock_guard<std::mutex> lock(signature->mutex);
      const auto known = signature->backwards.find(key);
      if (known != signature->backwards.end()) {
        return known->second;
      }
    }
    std::shared_ptr<Program> program;
    {
      pybind11::gil_scoped_acquire gil;
      Owned recorded = ask(operation->record_backward, inputs);
      if (recorded.get() != Py_None) {
        program = std::make_shared<Program>(program_of(recorded.get()));
        TORCH_CHECK(program->results.size() == num_outputs(), "fused_norm: a recording has a gradient for each tensor");
      }
    }
    std::lock_guard<std::mutex> lock(signature->mutex);
    if (signature->backwards.size() >= operation->limit) {
      signature->backwards.clear();
    }
    signature->backwards.emplace(key, program);
    return program;
  }

  // `function(known, saved, gradients, needed)`.
  Owned ask(PyObject* function, const Tensors& inputs) {
    Owned kept = tuple_of(inputs.data(), saved.size());
    Owned gradients = tuple_of(inputs.data() + saved.size(), inputs.size() - saved.size());
    Owned needed = own(PyTuple_New(static_cast<Py_ssize_t>(num_outputs())));
    for (size_t i = 0; i < num_outputs(); ++i) {
      PyTuple_SET_ITEM(needed.get(), i, PyBool_FromLong(should_compute_output(i)));
    }
    PyObject* arguments[] = {signature->known.get(), kept.get(), gradients.get(), needed.get()};
    return own(PyObject_Vectorcall(function, arguments, 4, nullptr));
  }

  variable_list in_python(const Tensors& inputs) {
    pybind11::gil_scoped_acquire gil;
    Owned answer = ask(operation->backward, inputs);
    variable_list found;
    for (size_t i = 0; i < num_outputs(); ++i) {
      PyObject* one = item(answer.get(), static_cast<Py_ssize_t>(i));
      found.push_back(one == Py_None ? Tensor() : THPVariable_Unpack(one));
    }
    return found;
  }

  Operation* operation;  // lives as long as the process
  std::shared_ptr<Signature> signature;
  std::vector<SavedVariable> saved;
};

// Nodes are counted from outside in older releases of PyTorch, from inside in newer ones.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Pointer, typename... Arguments>
Pointer new_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    // Freed without recursion, however long the chain; found by its argument, because newer releases have no such function.
    return Pointer(new ReplayNode(std::forward<Arguments>(arguments)...), [](auto* node) { deleteNode(node); });
  } else {
    return Pointer(c10::make_intrusive<ReplayNode>(std::forward<Arguments>(arguments)...));
  }
}

// ---- Calls from Python ----

// A call has the meaning of the norm, which is told apart by its address (None where there is no norm), then tensors, then
// other values.
std::shared_ptr<Signature> record(Operation* self, PyObject* const* arguments, bool differentiable) {
  const Py_ssize_t count = 1 + self->tensors + self->values;
  Owned packed = own(PyTuple_New(count));
  Owned kept = own(PyTuple_New(1 + self->values));
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(arguments[i]);
    PyTuple_SET_ITEM(packed.get(), i, arguments[i]);
    const Py_ssize_t among_kept = i == 0 ? 0 : i - self->tensors;
    if (i == 0 || among_kept > 0) {
      Py_INCREF(arguments[i]);
      PyTuple_SET_ITEM(kept.get(), among_kept, arguments[i]);
    }
  }
  PyObject* asked[] = {packed.get(), differentiable ? Py_True : Py_False};
  Owned recorded = own(PyObject_Vectorcall(self->record_forward, asked, 2, nullptr));
  auto signature = std::make_shared<Signature>();
  signature->arguments = std::move(kept);
  if (recorded.get() != Py_None) {
    signature->recorded = true;
    signature->program = program_of(item(recorded.get(), 0));
    Py_INCREF(item(recorded.get(), 1));
    signature->known = Owned(item(recorded.get(), 1));
  }
  return signature;
}

PyObject* invoke(Operation* self, PyObject* const* arguments, Py_ssize_t count, bool may_record) {
  HANDLE_TH_ERRORS
  if (count != 1 + self->tensors + self->values || calls_are_watched() || launches_are_watched()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  Tensors slots;
  bool differentiable = false;
  for (Py_ssize_t i = 1; i <= self->tensors; ++i) {
    if (arguments[i] == Py_None) {
      slots.emplace_back();
    } else if (THPVariable_CheckExact(arguments[i])) {
      slots.push_back(THPVariable_Unpack(arguments[i]));
      differentiable |= slots.back().requires_grad();
    } else {
      Py_RETURN_NOTIMPLEMENTED;
    }
  }
  if (!slots[0].defined() || slots[0].device().type() != driver.device_type) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const c10::Device device = slots[0].device();
  differentiable &= at::GradMode::is_enabled();
  if (differentiable &&
      c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  Key key;
  key.push_back(differentiable | device.index() << 1);
  if (!describe(key, slots.data(), slots.size(), device)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  key.push_back(reinterpret_cast<int64_t>(arguments[0]));
  for (Py_ssize_t i = 1 + self->tensors; i < count; ++i) {
    if (!describe(key, arguments[i])) {
      Py_RETURN_NOTIMPLEMENTED;
    }
  }
  const c10::DeviceGuard guard(device);
  void* stream = describe_stream(key, device);

  std::shared_ptr<Signature> signature;
  const auto known = self->signatures.find(key);
  if (known != self->signatures.end()) {
    signature = known->second;
  } else if (!may_record) {
    Py_RETURN_NOTIMPLEMENTED;
  } else {
    signature = record(self, arguments, differentiable);
    if (self->signatures.size() >= self->limit) {
      self->signatures.clear();
    }
    self->signatures.emplace(key, signature);
  }
  if (!signature->recorded) {
    Py_RETURN_NOTIMPLEMENTED;
  }

  const Program& program = signature->program;
  c10::SmallVector<Tensor, 4> outputs;
  {
    pybind11::gil_scoped_release no_gil;
    at::RecordFunction watch(at::RecordScope::FUNCTION);
    if (watch.isActive()) {
      watch.before(self->name, differentiable ? static_cast<int64_t>(at::sequence_number::peek()) : -1);
    }
    const size_t inputs = slots.size();
    program.run(slots, device, stream);
    for (size_t i = 0; i < program.results.size(); ++i) {
      outputs.push_back(program.result(slots, i));
    }
    if (differentiable) {
      torch::autograd::edge_list edges;
      edges.reserve(inputs);
      for (size_t i = 0; i < inputs; ++i) {
        edges.push_back(slots[i].defined() ? torch::autograd::impl::gradient_edge(slots[i]) : torch::autograd::Edge());
      }
      NodePointer node = new_node<NodePointer>(self, signature, std::move(edges));
      for (Tensor& output : outputs) {
        if (output.defined()) {
          torch::autograd::create_gradient_edge(output, node);
        } else {
          node->add_input_metadata(Node::undefined_input());
        }
      }
      auto& saved = static_cast<ReplayNode*>(node.get())->saved;
      saved.reserve(program.saved.size());
      for (const int64_t slot : program.saved) {
        const Tensor tensor = slot < 0 ? Tensor() : slots[slot];
        const bool is_output = tensor.defined() && tensor.grad_fn().get() == node.get();
        saved.emplace_back(tensor, is_output);
      }
    }
  }
  self->forwards.fetch_add(1, std::memory_order_relaxed);
  if (outputs.size() == 1) {
    return THPVariable_Wrap(std::move(outputs[0]));
  }
  Owned packed = own(PyTuple_New(static_cast<Py_ssize_t>(outputs.size())));
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyTuple_SET_ITEM(packed.get(), i, THPVariable_Wrap(std::move(outputs[i])));
  }
  PyObject* answer = packed.get();
  Py_INCREF(answer);
  return answer;
  END_HANDLE_TH_ERRORS
}

PyObject* call(PyObject* object, PyObject* const* arguments, size_t nargs, PyObject* names) {
  if (names != nullptr) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  return invoke(reinterpret_cast<Operation*>(object), arguments, PyVectorcall_NARGS(nargs), true);
}

PyObject* known(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  return invoke(reinterpret_cast<Operation*>(object), arguments, count, false);
}

// What the forward behind a tensor has computed for its backward alone; None where no replay has returned the tensor.
PyObject* kept(PyObject*, PyObject* output) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(THPVariable_Check(output), "fused_norm: only tensors come out of operators");
  const auto owner = THPVariable_Unpack(output).grad_fn();
  const auto* node = dynamic_cast<ReplayNode*>(owner.get());
  if (node == nullptr) {
    Py_RETURN_NONE;
  }
  const Program& program = node->signature->program;
  const auto& results = program.results;
  Tensors found;
  for (size_t i = 0; i < program.saved.size(); ++i) {
    const int64_t slot = program.saved[i];
    const bool returned = std::find(results.begin(), results.end(), slot) != results.end();
    if (slot >= node->operation->tensors && !returned) {
      found.push_back(node->saved[i].unpack(owner));
    }
  }
  return tuple_of(found.data(), found.size()).release();
  END_HANDLE_TH_ERRORS
}

PyObject* new_operation(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  const char* name = nullptr;
  Py_ssize_t tensors = 0, values = 0, limit = 0;
  PyObject *record_forward = nullptr, *record_backward = nullptr, *backward = nullptr;
  static const char* keywords[] = {
      "name", "tensors", "values", "limit", "record_forward", "record_backward", "backward", nullptr};
  if (!PyArg_ParseTupleAndKeywords(
          arguments, names, "snnnOOO", const_cast<char**>(keywords), &name, &tensors, &values, &limit, &record_forward,
          &record_backward, &backward)) {
    return nullptr;
  }
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Operation*>(object);
  self->call = call;
  self->tensors = tensors;
  self->values = values;
  self->limit = static_cast<size_t>(limit);
  for (PyObject* function : {record_forward, record_backward, backward}) {
    Py_INCREF(function);
  }
  self->record_forward = record_forward;
  self->record_backward = record_backward;
  self->backward = backward;
  new (&self->name) std::string(name);
  new (&self->signatures) Recordings<Signature>();
  new (&self->forwards) std::atomic<int64_t>(0);
  new (&self->backwards) std::atomic<int64_t>(0);
  Py_INCREF(object);  // nodes point at it: it is never freed
  return object;
}

PyObject* replayed(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Operation*>(object);
  return Py_BuildValue(
      "LL", static_cast<long long>(self->forwards.load()), static_cast<long long>(self->backwards.load()));
}

PyObject* forget(PyObject* object, PyObject*) {
  reinterpret_cast<Operation*>(object)->signatures.clear();
  Py_RETURN_NONE;
}

PyMethodDef operation_methods[] = {
    {"known", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(known)), METH_FASTCALL,
     "As a call, but NotImplemented where nothing was recorded yet."},
    {"kept", kept, METH_O, "What a forward has computed for its backward alone, from one of its outputs; or None."},
    {"replayed", replayed, METH_NOARGS, "How many forwards and backwards were replayed so far."},
    {"forget", forget, METH_NOARGS, "Drops all recordings."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject operation_type = {PyVarObject_HEAD_INIT(nullptr, 0) "fused_norm.Operation"};

// connect(current_stream, is_capturing, get_context, retain_context, set_context, launch, launch_knobs,
// allocator_is_registered, on_cpu)
PyObject* connect(PyObject*, PyObject* arguments) {
  unsigned long long addresses[6];
  PyObject* knobs = nullptr;
  int allocator_is_registered = 0, on_cpu = 0;
  if (!PyArg_ParseTuple(
          arguments, "KKKKKKOpp", &addresses[0], &addresses[1], &addresses[2], &addresses[3], &addresses[4],
          &addresses[5], &knobs, &allocator_is_registered, &on_cpu)) {
    return nullptr;
  }
  driver.current_stream = reinterpret_cast<decltype(driver.current_stream)>(addresses[0]);
  driver.is_capturing = reinterpret_cast<decltype(driver.is_capturing)>(addresses[1]);
  driver.get_context = reinterpret_cast<decltype(driver.get_context)>(addresses[2]);
  driver.retain_context = reinterpret_cast<decltype(driver.retain_context)>(addresses[3]);
  driver.set_context = reinterpret_cast<decltype(driver.set_context)>(addresses[4]);
  driver.launch = reinterpret_cast<decltype(driver.launch)>(addresses[5]);
  driver.allocator_is_registered = allocator_is_registered;
  driver.device_type = on_cpu ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
  Py_INCREF(knobs);
  Py_XDECREF(std::exchange(launch_knobs, knobs));
  Py_RETURN_NONE;
}

PyMethodDef module_methods[] = {
    {"connect", connect, METH_VARARGS, "Hands over the addresses of what kernels are launched with."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_replay", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit__replay() {
  operation_type.tp_basicsize = sizeof(Operation);
  operation_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  operation_type.tp_vectorcall_offset = offsetof(Operation, call);
  operation_type.tp_call = PyVectorcall_Call;
  operation_type.tp_new = new_operation;
  operation_type.tp_methods = operation_methods;
  operation_type.tp_doc = "An operator that replays its recordings; NotImplemented is for Python to answer.";
  if (PyType_Ready(&operation_type) < 0) {
    return nullptr;
  }
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) {
    return nullptr;
  }
  Py_INCREF(&operation_type);
  if (PyModule_AddObject(made, "Operation", reinterpret_cast<PyObject*>(&operation_type)) < 0) {
    Py_DECREF(made);
    return nullptr;
  }
  return made;
}
