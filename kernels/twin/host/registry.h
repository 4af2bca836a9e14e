// The host side of an op package, as far as ours uses it: shapes, contexts, the op definition, the platform. The names
// are those of the public documentation; behind them is just enough to run our tiling function and read our definition.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ge {

enum DataType : int32_t { DT_FLOAT = 0, DT_FLOAT16 = 1, DT_INT32 = 3, DT_INT64 = 9, DT_BF16 = 27, DT_UNDEFINED = 28 };
enum Format : int32_t { FORMAT_ND = 2 };
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0;
constexpr graphStatus GRAPH_FAILED = 0xffffffffu;

}  // namespace ge

namespace fe {

// What the twin's platform answers; on the device this is opaque.
struct PlatFormInfos {
    std::string soc;
    uint64_t ub_bytes = 0;
    uint32_t cores = 0;
};

}  // namespace fe

namespace gert {

class Shape {
  public:
    Shape() = default;
    Shape(std::initializer_list<int64_t> dims) : dims_(dims) {}
    explicit Shape(std::vector<int64_t> dims) : dims_(std::move(dims)) {}
    size_t GetDimNum() const { return dims_.size(); }
    int64_t GetDim(size_t index) const { return index < dims_.size() ? dims_[index] : 0; }
    int64_t GetShapeSize() const {
        int64_t size = 1;
        for (const int64_t dim : dims_) size *= dim;
        return size;
    }
    bool operator==(const Shape& other) const { return dims_ == other.dims_; }
    bool operator!=(const Shape& other) const { return dims_ != other.dims_; }

  private:
    std::vector<int64_t> dims_;
};

class StorageShape {
  public:
    StorageShape() = default;
    explicit StorageShape(Shape shape) : shape_(std::move(shape)) {}
    const Shape& GetStorageShape() const { return shape_; }
    const Shape& GetOriginShape() const { return shape_; }

  private:
    Shape shape_;
};

class CompileTimeTensorDesc {
  public:
    CompileTimeTensorDesc() = default;
    explicit CompileTimeTensorDesc(ge::DataType type) : type_(type) {}
    ge::DataType GetDataType() const { return type_; }

  private:
    ge::DataType type_ = ge::DT_UNDEFINED;
};

class RuntimeAttrs {
  public:
    const float* GetFloat(size_t index) const { return at<float>(index); }
    const int64_t* GetInt(size_t index) const { return at<int64_t>(index); }
    const bool* GetBool(size_t index) const { return at<bool>(index); }
    template <class T>
    void add(T value) {
        values_.push_back(std::make_shared<Holder<T>>(value));
    }

  private:
    struct Base {
        virtual ~Base() = default;
    };
    template <class T>
    struct Holder : Base {
        explicit Holder(T value) : value(value) {}
        T value;
    };
    template <class T>
    const T* at(size_t index) const {
        if (index >= values_.size()) return nullptr;
        const auto* holder = dynamic_cast<const Holder<T>*>(values_[index].get());
        return holder == nullptr ? nullptr : &holder->value;
    }
    std::vector<std::shared_ptr<Base>> values_;
};

class TilingContext {
  public:
    // ---- as documented
    const char* GetNodeName() const { return "RecurrentGatedDeltaRule"; }
    const StorageShape* GetInputShape(size_t index) const { return GetOptionalInputShape(index); }
    const StorageShape* GetOptionalInputShape(size_t index) const {
        const auto found = shapes.find(index);
        return found == shapes.end() ? nullptr : &found->second;
    }
    const CompileTimeTensorDesc* GetInputDesc(size_t index) const { return GetOptionalInputDesc(index); }
    const CompileTimeTensorDesc* GetOptionalInputDesc(size_t index) const {
        const auto found = types.find(index);
        return found == types.end() ? nullptr : &found->second;
    }
    const RuntimeAttrs* GetAttrs() const { return &attrs; }
    fe::PlatFormInfos* GetPlatformInfo() const { return &platform; }
    ge::graphStatus SetBlockDim(uint32_t value) {
        block_dim = value;
        return ge::GRAPH_SUCCESS;
    }
    ge::graphStatus SetTilingKey(uint64_t value) {
        tiling_key = value;
        return ge::GRAPH_SUCCESS;
    }
    size_t* GetWorkspaceSizes(size_t count) {
        workspaces.resize(count);
        return workspaces.data();
    }
    template <class T>
    T* GetTilingData() {
        static_assert(std::is_trivially_copyable_v<T>);
        tiling.assign(sizeof(T), 0xff);  // whoever forgets a field does not get a friendly zero
        return reinterpret_cast<T*>(tiling.data());
    }

    // ---- what the twin puts in and takes out
    std::map<size_t, StorageShape> shapes;
    std::map<size_t, CompileTimeTensorDesc> types;
    RuntimeAttrs attrs;
    mutable fe::PlatFormInfos platform;
    uint32_t block_dim = 0;
    uint64_t tiling_key = 0;
    std::vector<size_t> workspaces;
    std::vector<uint8_t> tiling;
};

class InferShapeContext {
  public:
    const Shape* GetInputShape(size_t index) const { return index < inputs.size() ? &inputs[index] : nullptr; }
    Shape* GetOutputShape(size_t index) { return index < outputs.size() ? &outputs[index] : nullptr; }
    std::vector<Shape> inputs, outputs;
};

class InferDataTypeContext {
  public:
    ge::DataType GetInputDataType(size_t index) const {
        return index < inputs.size() ? inputs[index] : ge::DT_UNDEFINED;
    }
    ge::graphStatus SetOutputDataType(size_t index, ge::DataType type) {
        if (index >= outputs.size()) return ge::GRAPH_FAILED;
        outputs[index] = type;
        return ge::GRAPH_SUCCESS;
    }
    std::vector<ge::DataType> inputs, outputs;
};

}  // namespace gert

namespace platform_ascendc {

enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM };
enum class SocVersion { ASCEND310P, ASCEND910B, RESERVED_VERSION };

class PlatformAscendC {
  public:
    explicit PlatformAscendC(fe::PlatFormInfos* infos) : infos_(infos) {}
    SocVersion GetSocVersion() const {
        if (infos_->soc == "ascend310p") return SocVersion::ASCEND310P;
        return infos_->soc == "ascend910b" ? SocVersion::ASCEND910B : SocVersion::RESERVED_VERSION;
    }
    void GetCoreMemSize(const CoreMemType& type, uint64_t& bytes) const {
        bytes = type == CoreMemType::UB ? infos_->ub_bytes : 0;
    }
    uint32_t GetCoreNumAiv() const { return infos_->cores; }
    uint32_t GetCoreNumAic() const { return infos_->cores; }
    uint32_t GetLibApiWorkSpaceSize() const { return 0; }

  private:
    fe::PlatFormInfos* infos_;
};

}  // namespace platform_ascendc

namespace ops {

enum Option { IGNORE = 0, OPTIONAL = 1, REQUIRED = 2, DYNAMIC = 3 };

using TilingFunction = ge::graphStatus (*)(gert::TilingContext*);
using InferShapeFunction = ge::graphStatus (*)(gert::InferShapeContext*);
using InferDataTypeFunction = ge::graphStatus (*)(gert::InferDataTypeContext*);

class OpParamDef {
  public:
    explicit OpParamDef(std::string name) : name(std::move(name)) {}
    OpParamDef& ParamType(Option value) {
        option = value;
        return *this;
    }
    OpParamDef& DataType(std::vector<ge::DataType> value) {
        types = std::move(value);
        return *this;
    }
    OpParamDef& Format(std::vector<ge::Format> value) {
        formats = std::move(value);
        return *this;
    }
    OpParamDef& UnknownShapeFormat(std::vector<ge::Format> value) {
        unknown_formats = std::move(value);
        return *this;
    }
    OpParamDef& AutoContiguous() {
        contiguous = true;
        return *this;
    }
    std::string name;
    Option option = REQUIRED;
    std::vector<ge::DataType> types;
    std::vector<ge::Format> formats, unknown_formats;
    bool contiguous = false;
};

class OpAttrDef {
  public:
    explicit OpAttrDef(std::string name) : name(std::move(name)) {}
    OpAttrDef& AttrType(Option value) {
        option = value;
        return *this;
    }
    OpAttrDef& Float(float value) { return set("float", std::to_string(value)); }
    OpAttrDef& Int(int64_t value) { return set("int", std::to_string(value)); }
    OpAttrDef& Bool(bool value) { return set("bool", value ? "true" : "false"); }
    std::string name, type, default_value;
    Option option = REQUIRED;

  private:
    OpAttrDef& set(const char* kind, std::string value) {
        type = kind;
        default_value = std::move(value);
        return *this;
    }
};

// Inputs and outputs by name; asked for again, the same one.
class Parameters {
  public:
    OpParamDef& Input(const char* name) { return get(inputs, name); }
    OpParamDef& Output(const char* name) { return get(outputs, name); }
    std::vector<std::shared_ptr<OpParamDef>> inputs, outputs;

  private:
    static OpParamDef& get(std::vector<std::shared_ptr<OpParamDef>>& all, const char* name) {
        for (auto& one : all)
            if (one->name == name) return *one;
        all.push_back(std::make_shared<OpParamDef>(name));
        return *all.back();
    }
};

class OpAICoreConfig : public Parameters {};

class OpAICoreDef {
  public:
    OpAICoreDef& SetTiling(TilingFunction function) {
        tiling = function;
        return *this;
    }
    OpAICoreDef& AddConfig(const char* soc) { return AddConfig(soc, OpAICoreConfig()); }
    OpAICoreDef& AddConfig(const char* soc, const OpAICoreConfig& config) {
        configs.emplace_back(soc, config);
        return *this;
    }
    TilingFunction tiling = nullptr;
    std::vector<std::pair<std::string, OpAICoreConfig>> configs;
};

class OpDef : public Parameters {
  public:
    explicit OpDef(const char* name) : name(name) {}
    OpAttrDef& Attr(const char* attr) {
        attrs.push_back(std::make_shared<OpAttrDef>(attr));
        return *attrs.back();
    }
    OpDef& SetInferShape(InferShapeFunction function) {
        infer_shape = function;
        return *this;
    }
    OpDef& SetInferDataType(InferDataTypeFunction function) {
        infer_data_type = function;
        return *this;
    }
    OpAICoreDef& AICore() { return core; }
    std::string name;
    std::vector<std::shared_ptr<OpAttrDef>> attrs;
    OpAICoreDef core;
    InferShapeFunction infer_shape = nullptr;
    InferDataTypeFunction infer_data_type = nullptr;
};

inline std::map<std::string, std::shared_ptr<OpDef>>& registered() {
    static std::map<std::string, std::shared_ptr<OpDef>> all;
    return all;
}

template <class Definition>
struct Registration {
    explicit Registration(const char* name) { registered()[name] = std::make_shared<Definition>(name); }
};

}  // namespace ops

#define OP_ADD(Name) static ::ops::Registration<Name> registration_of_##Name(#Name)
