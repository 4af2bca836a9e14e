// The few declarations of onnxruntime's C API that a custom-op library needs. The API is a table of functions that only
// ever grows; an entry is found by its index. Versions of this table from 18 on (onnxruntime 1.18) have all we use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qwen_npu::ort {

constexpr uint32_t kApiVersion = 18;

struct Status;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;
struct ShapeContext;
struct SessionOptions;
struct CustomOpDomain;

using Entry = void (*)();

struct ApiBase {
  const Entry* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

enum Index : int {
  kCreateStatus = 0,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetSymbolicDimensions = 63,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeFloat = 85,
  kKernelContextGetInputCount = 88,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kShapeContextGetInputTypeShape = 268,
  kShapeContextSetOutputTypeShape = 270,
  kKernelContextParallelFor = 274,
};

enum ElementType : int { kUndefined = 0, kFloat = 1, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBFloat16 = 16 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

// The table of one op. `version` tells onnxruntime how much of it exists.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Entry*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  int (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const CustomOp*, size_t);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Entry*, const KernelInfo*, void**);
  Status* (*KernelComputeV2)(void*, KernelContext*);
  Status* (*InferOutputShape)(const CustomOp*, ShapeContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int** input, int** output);
  void (*ReleaseMayInplace)(int* input, int* output);
  size_t (*GetAliasMap)(int** input, int** output);
  void (*ReleaseAliasMap)(int* input, int* output);
};

}  // namespace qwen_npu::ort
